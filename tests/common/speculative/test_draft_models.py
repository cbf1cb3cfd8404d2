"""Drafters against plain torch: the logits of every draft, in all layouts of checkpoints, over pages, chunks and
drafts that were not accepted."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.server import SpeculativeArgs
from baton.common.forward.forward_batch import ForwardBatch, Row, model_input
from baton.common.speculative.base import DraftStep
from baton.tests.helpers.draft_models import add_nextn, reference_chain, save_eagle, save_eagle3, save_nextn
from baton.tests.helpers.small_models import load_runner, save_model, scattered_pages, server_config

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
            features = runner._model.hidden_states_and_features(runner.plan(batch), layers)[1]
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
