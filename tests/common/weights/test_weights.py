"""Checkpoint loading: whole, sharded, tied, and every way in which one can be wrong."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.api.errors import ConfigError
from baton.common.distributed.parallel import Parallel
from baton.common.models.registry import load_model_spec
from baton.common.runner.model_runner import ModelRunner
from baton.tests.helpers.small_models import (
    expected_logits,
    forward,
    load_runner,
    save_model,
    scattered_pages,
    server_config,
)

TOKENS = torch.arange(1, 12).numpy()


def logits_of(runner: ModelRunner) -> torch.Tensor:
    return forward(runner, [(TOKENS, 0, scattered_pages(runner, 1, 16)[0])])


def test_sharded_checkpoint_and_progress(tmp_path):
    model = save_model(tmp_path, "Llama", shard="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config = server_config(tmp_path)
    told: list[tuple[str, float]] = []
    runner = ModelRunner.load(config, load_model_spec(config.model), Parallel(), "cpu", lambda *p: told.append(p))
    torch.testing.assert_close(logits_of(runner), expected_logits(model, TOKENS), atol=1e-4, rtol=0)
    fractions = [fraction for what, fraction in told if what == "loading weights"]
    assert fractions == sorted(fractions) and fractions[-1] == 1.0 and len(fractions) > 20
    assert told[-1] == ("ready", 1.0)


def test_half_precision_checkpoint_is_widened_on_a_cpu(tmp_path):
    save_model(tmp_path, "Llama").to(torch.bfloat16).save_pretrained(tmp_path)
    runner = load_runner(server_config(tmp_path))
    assert runner.spec.dtype == "bfloat16" and runner.layout.dtype == "float32"
    half = load_runner(server_config(tmp_path, dtype="bfloat16"))
    assert half.layout.dtype == "bfloat16" and logits_of(half).dtype == torch.float32
    torch.testing.assert_close(logits_of(half), logits_of(runner), atol=0.5, rtol=0.1)


def change(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


BROKEN = {
    "lacks model.layers.1.mlp.up_proj.weight": lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
    r"model.norm.weight in model.safetensors has shape \[3\], but config.json asks for \[48\]":
        lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
}


@pytest.mark.parametrize("message", BROKEN)
def test_wrong_tensors_are_named(tmp_path, message):
    save_model(tmp_path, "Llama")
    change(tmp_path, BROKEN[message])
    with pytest.raises(ConfigError, match=message):
        load_runner(server_config(tmp_path))


def test_tensors_that_the_model_has_no_use_for_are_named(tmp_path, caplog):
    model = save_model(tmp_path, "Llama")
    change(tmp_path, lambda t: t.update({"model.extra.weight": torch.zeros(2)}))
    torch.testing.assert_close(logits_of(load_runner(server_config(tmp_path))), expected_logits(model, TOKENS),
                               atol=1e-4, rtol=0)
    assert "holds model.extra.weight, which its architecture does not have" in caplog.text


def test_redundant_tensors_pass(tmp_path):
    model = save_model(tmp_path, "Llama", tie_word_embeddings=True)
    change(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(1),
                                         "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1)}))
    torch.testing.assert_close(logits_of(load_runner(server_config(tmp_path))), expected_logits(model, TOKENS),
                               atol=1e-4, rtol=0)


def test_unreadable_files(tmp_path):
    save_model(tmp_path, "Llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ConfigError, match="Cannot read .*model.safetensors"):
        load_runner(server_config(tmp_path))
    file.unlink()
    with pytest.raises(ConfigError, match="no safetensors files"):
        load_runner(server_config(tmp_path))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match="lacks gone.safetensors"):
        load_runner(server_config(tmp_path))


def test_dummy_weights_need_only_the_configuration_and_follow_the_seed(tmp_path):
    save_model(tmp_path, "Qwen3")
    (tmp_path / "model.safetensors").unlink()
    first, again, other = (logits_of(load_runner(server_config(tmp_path, load_format="dummy", random_seed=seed)))
                           for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.allclose(first, other)
    assert first.isfinite().all() and first.std() > 0
