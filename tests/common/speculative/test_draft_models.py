"""Drafters against plain torch: the logits of every draft, in all layouts of checkpoints, over pages, chunks and
drafts that were not accepted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.api.errors import ConfigError
from baton.common.config import checkpoint
from baton.common.config.draft_model import pin_revisions
from baton.common.config.server import DataParallelArgs, ParallelArgs, SpeculativeArgs
from baton.common.forward.forward_batch import ForwardBatch, Row, model_input
from baton.common.models.decoder.causal_lm import CausalLM
from baton.common.models.registry import MODELS, family_of
from baton.common.runner.dp_sync import DPStepInfo
from baton.common.speculative.base import DraftStep
from baton.tests.helpers.deepseek_models import save_with_predictors
from baton.tests.helpers.draft_models import (
    add_nextn,
    reference_chain,
    save_eagle,
    save_eagle3,
    save_nextn,
    save_with_token_map,
)
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.small_models import load_runner, save_model, scattered_pages, server_config
from baton.tests.helpers.small_moe import save_moe

TOLERANCE = 2e-4
LAYERS = (2, 1, 0)
"""EAGLE3's default for a model of three layers."""


def drafting_config(target, draft, algorithm: str, *, page_size: int = 4, model: dict[str, Any] | None = None, **flags):
    return dataclasses.replace(
        server_config(target, page_size=page_size, **(model or {})),
        speculative=SpeculativeArgs(speculative_algorithm=algorithm, speculative_num_steps=4,
                                    speculative_draft_model_path=None if draft is None else str(draft), **flags))


class Greedy:
    """Samples the best token of each row, and keeps the logits by request."""

    def __init__(self) -> None:
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.positions: dict[int, list[int]] = {}

    def sample(self, logits, requests, positions, count=1, token_ids=None):
        for request, position, row in zip(requests, positions, logits, strict=True):
            self.logits.setdefault(request, []).append(row.float().clone())
            self.positions.setdefault(request, []).append(position)
        best = logits.argmax(-1, keepdim=True)
        return best if token_ids is None else token_ids[best], best.float()


def draft(runner, parts: list[dict[str, Any]]) -> tuple[Any, Greedy]:
    """Runs the drafter over a step of requests, each with ``tokens`` (as the host knows them), ``ids`` of the step's
    rows from ``start`` on, its ``pages``, and, where it samples, the ``next`` token, ``count`` and ``limit``."""
    page_size = runner.layout.page_size
    step = model_input([Row(part["ids"], part["start"], part["pages"]) for part in parts], page_size,
                       list(range(sum(len(part["ids"]) for part in parts))))
    batch = ForwardBatch.from_columns(step.columns, step.token_ids, runner.device, step.logits_rows)
    features = None
    if runner.draft_model.features is not None:
        with torch.inference_mode():
            layers = runner.draft_model.features.layers
            groups = runner._parallel.dp_size
            info = DPStepInfo([batch.num_tokens] * groups, [batch.num_tokens] * groups, all_decode=False)
            features = runner._model.hidden_states_and_features(runner.plan(batch, info), layers)[1]
    following = []
    for part in parts:
        rows = [*part["ids"][1:], part["tokens"][min(part["start"] + len(part["ids"]), len(part["tokens"]) - 1)]]
        if "next" in part:  # of verified rows, the one after the last right one
            rows[len(rows) - part.get("drafted", 0) - 1 + part["count"] - 1] = part["next"]
        following += rows
    index = [i for i, part in enumerate(parts) if "next" in part]
    reqs = [SimpleNamespace(
        page_table=SimpleNamespace(ids=np.asarray(part["pages"]), count=len(part["pages"])),
        tokens=SimpleNamespace(count=len(part["tokens"]), view=lambda a, b, own=part["tokens"]: own[a:b]))
        for part in parts]
    lengths = np.array([len(part["ids"]) for part in parts])
    planned = SimpleNamespace(
        columns=step.columns, reqs=reqs, sample_index=index, q_lens=lengths,
        starts=np.array([part["start"] for part in parts]),
        num_samples=np.array([1 + part.get("drafted", 0) if "next" in part else 0 for part in parts]))
    sampler = Greedy()
    drafts = runner.drafter.run(DraftStep(planned, batch, features, torch.tensor(following),
                                          [parts[i]["count"] for i in index], [parts[i]["limit"] for i in index],
                                          sampler))
    return drafts, sampler


@torch.inference_mode()
def features_of(target, tokens, layers) -> torch.Tensor:
    states = target(torch.from_numpy(tokens)[None], output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], -1) if layers else states[-1][0]


def check_chain(runner, target, reference, tokens, sampler, request: int, drafts, count: int) -> None:
    """The ``count`` drafts after ``tokens`` [n + 1] equal the reference's."""
    combine, layer, ids = reference
    features = features_of(target, tokens[:-1], runner.draft_model.features.layers)
    want = reference_chain(combine, layer, features, tokens, count, ids, runner.draft_model.network.depth)
    found = sampler.logits[request][:count]
    torch.testing.assert_close(torch.stack(found), torch.stack(want), atol=TOLERANCE, rtol=0)
    columns = [int(row.argmax()) for row in want]
    assert list(drafts.tokens) == [column if ids is None else ids[column] for column in columns]
    assert sampler.positions[request][:count] == list(range(len(tokens), len(tokens) + count))


def check_drafts(runner, target, reference, chunk: int = 8) -> None:
    """Two prompts, one in chunks, then drafts some of which are accepted, and a row that may draft nothing."""
    rng = np.random.default_rng(7)
    one, other = rng.integers(0, 131, 40), rng.integers(0, 131, 40)
    pages = scattered_pages(runner, 2, 48)
    first = {"tokens": one[:13], "pages": pages[0]}
    for start in range(0, 12, chunk):
        stop = min(start + chunk, 12)
        draft(runner, [{**first, "ids": one[start:stop].tolist(), "start": start}])
    drafts, sampler = draft(runner, [
        {**first, "ids": one[12:13].tolist(), "start": 12, "next": one[13], "count": 1, "limit": 3},
        {"tokens": other[:22], "pages": pages[1], "ids": other[:22].tolist(), "start": 0, "next": other[22],
         "count": 1, "limit": 4}])
    check_chain(runner, target, reference, one[:14], sampler, 0, drafts[0], 3)
    check_chain(runner, target, reference, other[:23], sampler, 1, drafts[1], 4)
    # The second request had three drafts, of which the first is right; the first one may draft nothing.
    drafts, sampler = draft(runner, [
        {"tokens": one[:14], "pages": pages[0], "ids": one[13:14].tolist(), "start": 13, "next": one[14], "count": 1,
         "limit": 0},
        {"tokens": other[:23], "pages": pages[1], "ids": [*other[22:24].tolist(), 1, 2], "start": 22, "drafted": 3,
         "next": other[24], "count": 2, "limit": 2}])
    assert drafts[0] is None
    check_chain(runner, target, reference, other[:25], sampler, 1, drafts[1], 2)
    drafts, sampler = draft(runner, [
        {"tokens": one[:15], "pages": pages[0], "ids": one[14:15].tolist(), "start": 14, "next": one[15], "count": 1,
         "limit": 1},
        {"tokens": other[:25], "pages": pages[1], "ids": other[24:25].tolist(), "start": 24, "next": other[25],
         "count": 1, "limit": 3}])
    check_chain(runner, target, reference, one[:16], sampler, 0, drafts[0], 1)
    check_chain(runner, target, reference, other[:26], sampler, 1, drafts[1], 3)


EAGLE3 = {
    "authors": {}, "pickled": {"architecture": "LlamaForCausalLM", "pickled": True},
    "layers.0": {"prefix": "layers.0.", "own_embed": True},
    "whole vocabulary": {"draft_vocab": None, "bias": True},
    "norm before fc": {"norms": "input_norm", "norm_before_residual": True},
    "norm of each state": {"norms": "fc_norm"},
    "layers in eagle_config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 0, -1]}},
    "layers at the top": {"eagle_aux_hidden_state_layer_ids": [2, 1, 0]},
}
EAGLE = {"authors": {"pickled": True}, "two layers, no bias": {"layers": 2, "bias": False, "own_embed": True},
         "SGLang's": {"architecture": "LlamaForCausalLMEagle"}}


@pytest.mark.parametrize("layout", EAGLE3)
def test_eagle3(tmp_path, layout):
    target = save_model(tmp_path / "model", "Llama")
    reference = save_eagle3(tmp_path / "draft", target, **EAGLE3[layout])
    runner = load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE3"))
    assert runner.draft_model.features.layers == LAYERS
    check_drafts(runner, target, reference)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [5, 12])
def test_pages_and_chunks(tmp_path, page_size, chunk):
    target = save_model(tmp_path / "model", "Qwen3", tie_word_embeddings=True)
    reference = save_eagle3(tmp_path / "draft", target)
    config = drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE3", page_size=page_size)
    check_drafts(load_runner(config), target, reference, chunk)


@pytest.mark.parametrize("layout", EAGLE)
def test_eagle(tmp_path, layout):
    target = save_model(tmp_path / "model", "Llama")
    reference = save_eagle(tmp_path / "draft", target, **EAGLE[layout])
    check_drafts(load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE")), target, reference)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE"])
def test_nextn_of_a_checkpoint_of_its_own(tmp_path, algorithm, first):
    target = save_model(tmp_path / "model", "Qwen3")
    reference = save_nextn(tmp_path / "draft", target, first=first)
    check_drafts(load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", algorithm)), target, reference)


def test_nextn_of_the_models_checkpoint(tmp_path):
    target = save_model(tmp_path / "model", "Llama", rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
                        rms_norm_eps=1e-5, head_dim=12)
    reference = add_nextn(tmp_path / "model", target)
    runner = load_runner(drafting_config(tmp_path / "model", None, "NEXTN"))
    assert runner.draft_pool.num_pages == runner.pool.num_pages and runner.draft_model.layout.groups == (1,)
    check_drafts(runner, target, reference)


@pytest.mark.parametrize("chunk", [5, 30])
def test_several_layers_draft_a_token_each(tmp_path, chunk):
    """Layers after the first read the prompt's tokens beyond a chunk, and drafts at its end."""
    target = save_model(tmp_path / "model", "Llama", rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
                        rms_norm_eps=1e-5, head_dim=12)
    reference = add_nextn(tmp_path / "model", target, depth=2)
    runner = load_runner(drafting_config(tmp_path / "model", None, "NEXTN"))
    tokens, pages = np.random.default_rng(3).integers(0, 131, 31), scattered_pages(runner, 1, 48)[0]
    for start in range(0, 30, chunk):
        part = {"tokens": tokens[:30], "pages": pages, "ids": tokens[start:start + chunk].tolist(), "start": start}
        if start + chunk >= 30:
            part |= {"next": tokens[30], "count": 1, "limit": 4}
        drafts, sampler = draft(runner, [part])
    check_chain(runner, target, reference, tokens, sampler, 0, drafts[0], 4)


def test_token_map(tmp_path):
    """The drafts are the best of the map's tokens; ids may be in any of three kinds of files."""
    target = save_model(tmp_path / "model", "Llama")
    combine, layer, _ = save_eagle(tmp_path / "draft", target)
    ids = list(range(3, 131, 5))
    torch.save(torch.tensor(ids[::-1]), tmp_path / "map.pt")
    (tmp_path / "map.json").write_text(str(ids))
    (tmp_path / "map.txt").write_text("\n".join(map(str, ids)))

    def restricted(index, hidden, tokens):
        logits, states = layer(index, hidden, tokens)
        return logits[:, ids], states

    for name in ("map.pt", "map.json", "map.txt"):
        config = drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE",
                                 speculative_token_map=str(tmp_path / name))
        check_drafts(load_runner(config), target, (combine, restricted, ids))
    for content, error in (("131", "must have ids from 0 to 130"), ("a", "Cannot read"), ("", "must have ids")):
        (tmp_path / "bad.txt").write_text(content)
        with pytest.raises(ConfigError, match=error):
            load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE",
                                        speculative_token_map=str(tmp_path / "bad.txt")))


@torch.inference_mode()
def greedy_logits(model: Any, tokens: np.ndarray, count: int) -> list[torch.Tensor]:
    """The logits of each of ``count`` greedy tokens after ``tokens``."""
    ids, found = tokens.tolist(), []
    for _ in range(count):
        found.append(model(torch.tensor([ids])).logits[0, -1])
        ids.append(int(found[-1].argmax()))
    return found


def check_standalone(sampler: Greedy, request: int, drafts: Any, model: Any, tokens: np.ndarray, count: int) -> None:
    want = greedy_logits(model, tokens, count)
    torch.testing.assert_close(torch.stack(sampler.logits[request]), torch.stack(want), atol=TOLERANCE, rtol=0)
    assert list(drafts.tokens) == [int(row.argmax()) for row in want]
    assert sampler.positions[request] == list(range(len(tokens), len(tokens) + count))


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", ["Qwen2", "GptOss"])
def test_standalone(tmp_path, family, page_size):
    """Two prompts, one in chunks, then drafts some of which are accepted; rows that may draft nothing."""
    save_model(tmp_path / "model", "Llama")
    small = save_moe(tmp_path / "draft", family) if family == "GptOss" else save_model(
        tmp_path / "draft", family, num_hidden_layers=2)
    runner = load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "STANDALONE", page_size=page_size))
    assert runner.lookahead == 0 and len(runner.pools) == 1
    rng = np.random.default_rng(7)
    one, other = rng.integers(0, 131, 40), rng.integers(0, 131, 40)
    pages = scattered_pages(runner, 2, 48)
    draft(runner, [{"tokens": one[:20], "pages": pages[0], "ids": one[:17].tolist(), "start": 0}])
    drafts, sampler = draft(runner, [
        {"tokens": one[:20], "pages": pages[0], "ids": one[17:20].tolist(), "start": 17, "next": one[20], "count": 1,
         "limit": 2},
        {"tokens": other[:22], "pages": pages[1], "ids": other[:22].tolist(), "start": 0, "next": other[22],
         "count": 1, "limit": 4}])
    check_standalone(sampler, 0, drafts[0], small, one[:21], 2)
    check_standalone(sampler, 1, drafts[1], small, other[:23], 4)
    drafts, sampler = draft(runner, [
        {"tokens": one[:21], "pages": pages[0], "ids": one[20:21].tolist(), "start": 20, "next": one[21], "count": 1,
         "limit": 0},
        {"tokens": other[:23], "pages": pages[1], "ids": [*other[22:24].tolist(), 1, 2], "start": 22, "drafted": 3,
         "next": other[24], "count": 2, "limit": 3}])
    assert drafts[0] is None and 0 not in sampler.logits
    check_standalone(sampler, 1, drafts[1], small, other[:25], 3)
    drafts, sampler = draft(runner, [
        {"tokens": one[:22], "pages": pages[0], "ids": one[21:22].tolist(), "start": 21, "next": one[22], "count": 1,
         "limit": 1},
        {"tokens": other[:25], "pages": pages[1], "ids": [int(other[24]), 5], "start": 24, "drafted": 1,
         "next": other[25], "count": 1, "limit": 0}])
    check_standalone(sampler, 0, drafts[0], small, one[:23], 1)
    assert drafts[1] is None


def test_standalone_token_map(tmp_path):
    small, ids = save_with_token_map(tmp_path)
    runner = load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "STANDALONE",
                                         speculative_token_map=str(tmp_path / "map.txt")))
    tokens, pages = np.random.default_rng(7).integers(0, 131, 21), scattered_pages(runner, 1, 48)[0]
    drafts, sampler = draft(runner, [{"tokens": tokens[:20], "pages": pages, "ids": tokens[:20].tolist(), "start": 0,
                                      "next": tokens[20], "count": 1, "limit": 1}])
    want = greedy_logits(small, tokens, 1)[0][ids]
    torch.testing.assert_close(sampler.logits[0][0], want, atol=TOLERANCE, rtol=0)
    assert drafts[0].tokens == (ids[int(want.argmax())],)


@pytest.mark.parametrize("chunk", [9, 30])
@pytest.mark.parametrize("depth", [1, 2])
def test_latent_layers_with_experts(tmp_path, depth, chunk):
    """DeepSeek-V3's layers against transformers'; the reference computes all rows at once."""
    model, *layers = save_with_predictors(tmp_path, depth)
    runner = load_runner(drafting_config(tmp_path, None, "NEXTN"))
    assert runner.draft_model.layout.form == "latent" and runner.draft_model.layout.groups == (depth,)
    tokens, pages = np.random.default_rng(3).integers(0, 131, 31), scattered_pages(runner, 1, 48)[0]
    for start in range(0, 30, chunk):
        stop = min(start + chunk, 30)
        part = {"tokens": tokens[:30], "pages": pages, "ids": tokens[start:stop].tolist(), "start": start}
        if stop == 30:
            part |= {"next": tokens[30], "count": 1, "limit": 4}
        drafts, sampler = draft(runner, [part])

    def layer(index, hidden, ids):
        states = layers[index](hidden, ids)
        return model.lm_head(states), states

    check_chain(runner, model, (lambda features: features, layer, None), tokens, sampler, 0, drafts[0], 4)


def test_dummy_weights(tmp_path):
    """A config.json alone is enough."""
    target = save_model(tmp_path / "model", "Llama")
    for name, save in {"EAGLE3": save_eagle3, "EAGLE": save_eagle, "NEXTN": save_nextn}.items():
        save(tmp_path / name, target)
        (tmp_path / name / "model.safetensors").unlink()
        runner = load_runner(drafting_config(tmp_path / "model", tmp_path / name, name,
                                             model={"load_format": "dummy"}))
        tokens, pages = np.random.default_rng(7).integers(0, 131, 21), scattered_pages(runner, 1, 48)[0]
        drafts, sampler = draft(runner, [{"tokens": tokens[:20], "pages": pages, "ids": tokens[:20].tolist(),
                                          "start": 0, "next": tokens[20], "count": 1, "limit": 4}])
        assert len(drafts[0]) == 4 and torch.isfinite(torch.stack(sampler.logits[0])).all()
        assert sampler.logits[0][0].shape == (40 if name == "EAGLE3" else 131,)


ERRORS = {
    "vocabulary": ("STANDALONE", {"vocab_size": 97}, "has a vocabulary of 97 tokens, and .*model one of 131"),
    "hidden size": ("EAGLE3", {"hidden_size": 60, "head_dim": 15},
                    "is for a model of hidden size 60, and .*model has 48: use a draft model that was trained for it"),
    "another target": ("EAGLE3", {"target_hidden_size": 64}, "hidden size 64, and .* has 48"),
    "layers of another target": ("EAGLE3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 9]}},
                                 r"of the layers \[2, 6, 10\], and the model has 3 layers"),
    "several layers": ("EAGLE3", {"num_hidden_layers": 2}, "has 2 layers: --speculative-algorithm EAGLE3 reads heads"),
    "hidden size of EAGLE": ("EAGLE", {"hidden_size": 60, "head_dim": 15}, "hidden size 60"),
    "no layers": ("NEXTN", {}, "has no layers of multi-token prediction"),
    "shapes": ("EAGLE3", {"intermediate_size": 80}, r"midlayer.mlp.\w+.weight in .* has shape \[.*\], but config.json"),
    "architecture": ("EAGLE3", {"architectures": ["RwkvForCausalLM"]}, "Architecture RwkvForCausalLM is not supported"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_draft_models_that_do_not_fit(tmp_path, case):
    algorithm, changes, error = ERRORS[case]
    target = save_model(tmp_path / "model", "Llama")
    save_eagle3(tmp_path / "draft", target, **changes)
    if "architectures" in changes:
        config = (tmp_path / "draft" / "config.json").read_text()
        (tmp_path / "draft" / "config.json").write_text(config.replace("LlamaForCausalLMEagle3", "RwkvForCausalLM"))
    with pytest.raises(ConfigError, match=error):
        load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", algorithm))


def test_checkpoints_that_are_not_there_or_have_another_tokenizer(tmp_path):
    save_model(tmp_path / "model", "Llama")
    save_model(tmp_path / "draft", "Llama")
    with pytest.raises(ConfigError, match="--speculative-draft-model-path /nowhere: there is no checkpoint folder"):
        load_runner(drafting_config(tmp_path / "model", "/nowhere", "STANDALONE"))
    with pytest.raises(ConfigError, match="has no layers of multi-token prediction: num_nextn_predict_layers"):
        load_runner(drafting_config(tmp_path / "model", None, "EAGLE"))
    for folder, ids in (("model", [0, 1, 2]), ("draft", [0, 2, 1])):
        (tmp_path / folder / "tokenizer.json").write_text(json.dumps({
            "model": {"vocab": dict(zip("abc", ids))}, "added_tokens": [{"content": "<s>", "id": 9}]}))
    with pytest.raises(ConfigError, match="another tokenizer than .*: 2 of its 4 tokens have another id there"):
        load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "STANDALONE"))
    for folder, pairs in (("model", [["a", 0.0], ["b", 0.0]]), ("draft", [["a", 0.0], ["b", -1.0]])):
        (tmp_path / folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pairs}}))
    load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "STANDALONE"))


def test_d2t_of_another_vocabulary(tmp_path):
    target = save_model(tmp_path / "model", "Llama")
    save_eagle3(tmp_path / "draft", target)
    file = tmp_path / "draft" / "model.safetensors"
    tensors = load_file(file)
    tensors["d2t"][-1] = 200
    file.unlink()
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"draft tokens \(d2t\) that are not among the model's 131"):
        load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE3"))


def test_flags_that_do_not_fit(tmp_path):
    for flags, error in (
            ({"speculative_algorithm": "EAGLE3"}, "EAGLE3 needs the folder or the name of its draft model"),
            ({"speculative_algorithm": "STANDALONE"}, "STANDALONE needs the folder"),
            ({"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "x"}, "is for EAGLE, EAGLE3, NEXTN"),
            ({"speculative_draft_model_path": "x"}, "is for EAGLE, EAGLE3, NEXTN and STANDALONE"),
            ({"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "x", "speculative_token_map": "y"},
             "EAGLE3's heads have one of their own"),
            ({"speculative_token_map": "y"}, "--speculative-token-map restricts")):
        with pytest.raises(ConfigError, match=error):
            SpeculativeArgs(**flags)
    with pytest.raises(ConfigError, match="shares no hidden states, embedding or head with a draft model"):
        drafting_config(tmp_path, None, "NEXTN", model={"model_impl": "transformers"})


def draft_by_each(folder: Path, size: int, parallel: Any) -> dict[str, torch.Tensor]:
    """The logits of four drafts after a prompt, by each algorithm."""
    found = {}
    for name in ("EAGLE3", "EAGLE", "NEXTN", "STANDALONE"):
        flags = {"speculative_token_map": str(folder / "map.txt")} if name == "EAGLE" else {}
        config = drafting_config(folder / "model", folder / name, name, **flags)
        groups = 1 if parallel is None else parallel.dp_size
        config = dataclasses.replace(config, parallel=ParallelArgs(tp_size=size),
                                     data_parallel=DataParallelArgs(groups > 1, groups))
        runner = load_runner(config, parallel)
        tokens, pages = np.random.default_rng(7).integers(0, 131, 21), scattered_pages(runner, 1, 48)[0]
        _, sampler = draft(runner, [{"tokens": tokens[:20], "pages": pages, "ids": tokens[:20].tolist(), "start": 0,
                                     "next": tokens[20], "count": 1, "limit": 4}])
        found[name] = torch.stack(sampler.logits[0])
    return found


@pytest.mark.parametrize("dp_size", [1, 2])
def test_ranks_draft_alike(tmp_path, dp_size):
    """Two ranks, of one attention group or of two: the drafts of one rank, with a map of tokens too."""
    target = save_model(tmp_path / "model", "Llama")
    save_eagle3(tmp_path / "EAGLE3", target)
    save_eagle(tmp_path / "EAGLE", target)
    save_nextn(tmp_path / "NEXTN", target)
    save_model(tmp_path / "STANDALONE", "Qwen2")
    (tmp_path / "map.txt").write_text(" ".join(map(str, range(0, 131, 2))))
    want = draft_by_each(tmp_path, 1, None)
    for found in run_ranks(Path(__file__).with_name("draft_rank.py"), 2, tmp_path, str(tmp_path), str(dp_size)):
        for name, logits in want.items():
            torch.testing.assert_close(found[name], logits, atol=TOLERANCE, rtol=0)


def test_families_without_blocks_have_no_draft_layers(tmp_path, monkeypatch):
    target = save_model(tmp_path / "model", "Llama")
    save_nextn(tmp_path / "draft", target)
    family = family_of("LlamaForCausalLM")

    def build(spec, parallel, dtype, device):
        return CausalLM(spec, parallel, dtype, device, family.blocks(spec, parallel))

    monkeypatch.setitem(MODELS._entries, "LlamaForCausalLM", dataclasses.replace(family, blocks=None, build=build))
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no draft layers: its family names no blocks"):
        load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "NEXTN"))


def test_revisions_are_pinned(tmp_path, monkeypatch):
    """All processes load the hub's commit of the draft model, too."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    asked = []

    def download(name, revision, patterns, on_progress=None, *, folder=None):
        asked.append((name, revision))
        if name == "org/missing":
            raise ConfigError(f"--model-path {name}: neither a local folder nor a readable hub repository.")
        return tmp_path / commit

    monkeypatch.setattr(checkpoint, "download", download)
    config = drafting_config(tmp_path, "org/draft", "EAGLE3", speculative_draft_model_revision="main")
    assert pin_revisions(config).speculative.speculative_draft_model_revision == commit
    assert asked == [("org/draft", "main")] and pin_revisions(server_config(tmp_path)) == server_config(tmp_path)
    with pytest.raises(ConfigError, match="^--speculative-draft-model-path org/missing: neither"):
        pin_revisions(drafting_config(tmp_path, "org/missing", "EAGLE3"))


def test_eagle3_heads_of_the_speculators_library(tmp_path):
    target = save_model(tmp_path / "model", "Llama")
    reference = save_eagle3(tmp_path / "draft", target, prefix="layers.0.", own_embed=True, norm_before_residual=True)
    file = tmp_path / "draft" / "config.json"
    flat = json.loads(file.read_text())
    own = {name: flat.pop(name) for name in ("draft_vocab_size", "norm_before_residual")}
    del flat["architectures"]
    nested = {"architectures": ["Eagle3Speculator"], "draft_vocab_size": own["draft_vocab_size"],
              "eagle_aux_hidden_state_layer_ids": [2, 1, 0], "target_hidden_size": None,
              "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/model"}},
              "transformer_layer_config": {**flat, "model_type": "llama"}}
    for kind in ({"speculators_model_type": "eagle3"}, {}):
        file.write_text(json.dumps({**nested, **kind}))
        runner = load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE3"))
        assert runner.draft_model.features.layers == LAYERS
        check_drafts(runner, target, reference)
    for kind in ({"speculators_model_type": "eagle"}, {"architectures": ["DFlareDraftModel"]}):
        file.write_text(json.dumps({**nested, **kind}))
        with pytest.raises(ConfigError, match=r"a speculator of the kind (eagle|DFlareDraftModel): .* EAGLE3 reads"):
            load_runner(drafting_config(tmp_path / "model", tmp_path / "draft", "EAGLE3"))


def write_tokenizer(folder: Path, count: int) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {f"t{id}": id for id in range(count)}}}))


def pad_tables(folder: Path, rows: int) -> None:
    """Gives tables of the vocabulary ``rows`` rows, also in config.json."""
    file, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if len(tensor) == config["vocab_size"]:
            tensors[name] = torch.cat([tensor, torch.full((16, *tensor.shape[1:]), 9.0)])[:rows].contiguous()
    file.unlink()
    save_file(tensors, file)
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": rows}))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [140, 125])
def test_a_vocabulary_that_is_padded_to_another_size(tmp_path, rows, tied):
    """The tokenizer has 120 tokens, the model 131 rows."""
    save_model(tmp_path / "model", "Llama")
    write_tokenizer(tmp_path / "model", 120)
    found = {}
    for name in ("equal", "padded"):
        save_model(tmp_path / name, "Qwen2", tie_word_embeddings=tied)
        write_tokenizer(tmp_path / name, 120)
        if name == "padded":
            pad_tables(tmp_path / name, rows)
        runner = load_runner(drafting_config(tmp_path / "model", tmp_path / name, "STANDALONE"))
        tokens, pages = np.random.default_rng(7).integers(0, 120, 21), scattered_pages(runner, 1, 48)[0]
        found[name] = draft(runner, [{"tokens": tokens[:20], "pages": pages, "ids": tokens[:20].tolist(), "start": 0,
                                      "next": tokens[20], "count": 1, "limit": 1}])[1].logits[0][0]
    width = min(rows, 131)
    assert found["padded"].shape == (width,)
    torch.testing.assert_close(found["padded"], found["equal"][:width], atol=TOLERANCE, rtol=0)
    write_tokenizer(tmp_path / "model", 126)
    if rows < 126:
        with pytest.raises(ConfigError, match="has a vocabulary of 125 tokens, and .*model one of 131"):
            load_runner(drafting_config(tmp_path / "model", tmp_path / "padded", "STANDALONE"))


@pytest.mark.parametrize("draft_vocab", [40, None])
@pytest.mark.parametrize("rows", [140, 125])
def test_eagle3_heads_whose_vocabulary_is_padded_to_another_size(tmp_path, rows, draft_vocab):
    target = save_model(tmp_path / "model", "Llama")
    write_tokenizer(tmp_path / "model", 120)
    for name in ("equal", "padded"):
        save_eagle3(tmp_path / name, target, own_embed=True, draft_vocab=draft_vocab)
    pad_tables(tmp_path / "padded", rows)
    found = []
    for name in ("equal", "padded"):
        runner = load_runner(drafting_config(tmp_path / "model", tmp_path / name, "EAGLE3"))
        tokens, pages = np.random.default_rng(7).integers(0, 120, 21), scattered_pages(runner, 1, 48)[0]
        found.append(draft(runner, [{"tokens": tokens[:20], "pages": pages, "ids": tokens[:20].tolist(), "start": 0,
                                     "next": tokens[20], "count": 1, "limit": 1}])[1].logits[0][0])
    torch.testing.assert_close(found[1], found[0][:len(found[1])], atol=TOLERANCE, rtol=0)
