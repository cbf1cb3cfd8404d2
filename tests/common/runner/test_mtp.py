"""Layers of multi-token prediction against transformers' decoder layers, over chunks and ranks; drafts of
greedy answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm

from baton.common.api.errors import ConfigError
from baton.common.bench import draft_acceptance
from baton.common.bench.draft_acceptance import Acceptance, Drafting
from baton.common.bench.workloads.workload import Prompt, Turn
from baton.tests.common.models.test_models_numerics import TOLERANCE
from baton.tests.common.runner.mtp_rank import TOKENS, rows_by_chunks, with_layers
from baton.tests.helpers.deepseek_models import copy_of, save_deepseek, save_with_predictors
from baton.tests.helpers.family_parity import randomize, save_random
from baton.tests.helpers.hybrid_models import add_draft_layer, save_hybrid
from baton.tests.helpers.rank_processes import run_ranks
from baton.tests.helpers.repacked_models import change_config
from baton.tests.helpers.small_models import load_runner, server_config


@torch.inference_mode()
def expected_rows(model: Any, *draft: Any) -> torch.Tensor:
    ids = torch.from_numpy(TOKENS)
    rows = [model.model(ids[None, :38]).last_hidden_state[0]]
    for k, foretold in enumerate(draft, 1):
        rows.append(foretold(rows[-1], ids[k:38 + k]))
    return torch.stack(rows[1:])


@pytest.mark.parametrize("chunk", [38, 11])
def test_rows_equal_transformers(tmp_path, chunk):
    models = save_with_predictors(tmp_path, 2)
    runner = load_runner(with_layers(server_config(tmp_path, page_size=4)))
    got = rows_by_chunks(runner, chunk)
    torch.testing.assert_close(got, expected_rows(*models), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("chunk", [38, 11])
def test_rows_of_a_hybrid_model_equal_transformers(tmp_path, chunk):
    """Its layer of multi-token prediction has attention, whatever the model's first layer has."""
    model = save_hybrid(tmp_path, vocab_size=131)
    draft = add_draft_layer(tmp_path, model)
    runner = load_runner(with_layers(server_config(tmp_path, page_size=4)))
    torch.testing.assert_close(rows_by_chunks(runner, chunk), expected_rows(model, draft), atol=TOLERANCE, rtol=0)


DEEPSEEKS = "model.layers.3.", "enorm", "hnorm", "eh_proj", "shared_head.norm"
"""Names of a layer of multi-token prediction, as most checkpoints have them."""
MIMOS = "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"


@pytest.mark.parametrize("name,changes,names", [
    ("Glm4Moe", {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "use_qk_norm": True,
                 "n_group": 2, "topk_group": 1, "attention_bias": True, "head_dim": 16}, DEEPSEEKS),
    ("Qwen2", {"architectures": ["MiMoForCausalLM"]}, MIMOS)])
def test_rows_of_other_families_equal_transformers(tmp_path, name, changes, names):
    """GLM-4.5, and MiMo, whose projection takes the hidden state first."""
    model = save_random(tmp_path, name, first_k_dense_replace=1, **changes)
    draft = add_layer(tmp_path, model, names, first_k_dense_replace=0)
    change_config(tmp_path, {"num_nextn_predict_layers": 1, **{key: changes[key] for key in changes
                                                               if key == "architectures"}})
    runner = load_runner(with_layers(server_config(tmp_path, page_size=4)))
    torch.testing.assert_close(rows_by_chunks(runner, 11), expected_rows(model, draft), atol=TOLERANCE, rtol=0)


def add_layer(folder: Path, model: Any, names: tuple[str, ...], **changes: Any) -> Any:
    """Adds a layer of multi-token prediction to the checkpoint of transformers' ``model``; returns the function that
    drafts."""
    prefix, token, hidden, projection, last = names
    block = type(model.model)(copy_of(model.config, num_hidden_layers=1, **changes)).eval()
    randomize(block)
    size, eps = model.config.hidden_size, model.config.rms_norm_eps
    own = {f"{token}.weight": torch.rand(size) + 0.5, f"{hidden}.weight": torch.rand(size) + 0.5,
           f"{projection}.weight": torch.randn(size, 2 * size) * 0.1, f"{last}.weight": block.norm.weight}
    path = folder / "model.safetensors"
    tensors = load_file(path) | {prefix + key: value.detach().contiguous().clone()
                                 for key, value in (own | block.layers[0].state_dict()).items()}
    path.unlink()
    save_file(tensors, path)

    @torch.inference_mode()
    def draft(states: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        parts = [rms_norm(x, (size,), own[f"{norm}.weight"], eps)
                 for x, norm in ((model.model.embed_tokens(following), token), (states, hidden))]
        joined = torch.cat(parts if prefix == DEEPSEEKS[0] else parts[::-1], -1)
        return block(inputs_embeds=linear(joined, own[f"{projection}.weight"])[None]).last_hidden_state[0]

    return draft


def test_ranks_equal_transformers(tmp_path):
    models = save_with_predictors(tmp_path / "model", 2)
    want = expected_rows(*models)
    for found in run_ranks(Path(__file__).with_name("mtp_rank.py"), 2, tmp_path, str(tmp_path / "model")):
        torch.testing.assert_close(found, want, atol=1e-4, rtol=0)


def test_acceptance_of_a_models_own_answer(tmp_path):
    """Counted by hand from transformers' answer and its predictors' guesses."""
    model, first, second = save_with_predictors(tmp_path, 2, echo=3.0)
    drafting = Drafting.load(with_layers(server_config(tmp_path)))
    prompt, count = TOKENS[:9].tolist(), 30
    with torch.inference_mode():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=[-1])[0]
        hidden = model.model(ids[None]).last_hidden_state[0]
        behind = torch.cat([ids, ids.new_zeros(2)])
        one = first(hidden, behind[1:len(ids) + 1])
        two = second(one, behind[2:len(ids) + 2])
        guesses = [model.lm_head(rows).argmax(-1) for rows in (one, two)]
    places = range(8, len(ids) - 3)
    right = [(bool(guesses[0][t] == ids[t + 2]), bool(guesses[1][t] == ids[t + 3])) for t in places]
    want = Acceptance(len(right), (sum(a for a, _ in right), sum(a and b for a, b in right)))
    assert drafting.measure(Turn(Prompt(9, ids=prompt), count)) == want
    assert want.steps == 28 and 0 < want.accepted[1] < want.accepted[0] < 28
    assert Acceptance(20, (10, 5)) + Acceptance(20, (10, 1)) == Acceptance(40, (20, 6))
    assert Acceptance(40, (20, 6)).tokens_per_step == 1.65


def test_command(tmp_path, capsys):
    model, *_ = save_with_predictors(tmp_path / "model", 1)
    out = tmp_path / "figures.jsonl"
    flags = ["--model-path", str(tmp_path / "model"), "--device", "cpu", "--dataset-name", "random-ids",
             "--num-prompts", "2", "--random-input-len", "12", "--random-output-len", "8", "--random-range-ratio", "1",
             "--output-file", str(out)]
    with pytest.raises(SystemExit) as ended:
        draft_acceptance.main(flags)
    assert ended.value.code == 0
    assert "14 positions in greedy answers" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["steps"] == 14 and record["tokens_per_step"] == 1 + record["accepted"][0] / 14
    with pytest.raises(SystemExit) as ended:
        draft_acceptance.main([*flags, "--random-output-len", "300"])
    assert ended.value.code == 2 and "more than the model's context of 256" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        draft_acceptance.main([*flags, "--max-total-tokens", "16"])
    assert ended.value.code == 2 and "--max-total-tokens 16 has no room for 20 tokens" in capsys.readouterr().err


def test_checkpoints_without_predictors_are_refused(tmp_path):
    save_deepseek(tmp_path, 3, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match="has no layers of multi-token prediction"):
        load_runner(with_layers(server_config(tmp_path)))


def test_predictors_that_are_not_whole_are_refused(tmp_path):
    save_with_predictors(tmp_path, 1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.3.enorm.weight"]
    file.unlink()
    save_file(tensors, file)
    with pytest.raises(ConfigError, match="lacks model.layers.3.enorm.weight"):
        load_runner(with_layers(server_config(tmp_path)))
