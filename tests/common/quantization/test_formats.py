"""The registry of quantization formats, and a format in one file that a user registers."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.common.api.errors import ConfigError
from baton.common.config.quantization import choose_quantization
from baton.common.quantization.fp8 import Fp8
from baton.common.quantization.mxfp4 import Mxfp4
from baton.tests.helpers.deepseek_models import save_deepseek
from baton.tests.helpers.int8_format import quantize_checkpoint, registered
from baton.tests.helpers.small_models import expected_logits, forward, load_runner, save_model, scattered_pages
from baton.tests.helpers.small_models import server_config as config_of
from baton.tests.helpers.small_moe import save_moe
from baton.tests.integration.transfer.test_deepseek_relay import pair_equal_to_unified
from baton.tests.integration.transfer.test_relay_in_process import VOCAB, bootstrap_port

__all__ = ["bootstrap_port"]
TOKENS = np.random.default_rng(2).integers(0, VOCAB, 30)


@pytest.fixture
def toy():
    with registered() as module:
        yield module


def logits_of(folder, **model) -> torch.Tensor:
    runner = load_runner(config_of(folder, **model))
    return forward(runner, [(TOKENS, 0, scattered_pages(runner, 1, 30)[0])])


# ---- the registry

def test_formats_are_read_without_torch():
    code = ("import sys; from baton.common.config.quantization import choose_quantization as choose\n"
            "for method in ('fp8', 'mxfp4'): choose({'quantization_config': {'quant_method': method}}, None)\n"
            "choose({}, 'fp8_per_block'); assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_formats_are_chosen_by_the_checkpoint_and_the_flag():
    packed, stored = ({"quantization_config": {"quant_method": method}} for method in ("mxfp4", "fp8"))
    assert choose_quantization({}, None) is None
    assert choose_quantization(packed, None) == choose_quantization(packed, "mxfp4") == Mxfp4()
    assert choose_quantization(packed, "fp8_per_tensor") == choose_quantization({}, "fp8_per_tensor") == Fp8("tensor")
    assert choose_quantization(stored, "fp8") == Fp8("tensor", stored=True)
    for config in ({}, stored):
        with pytest.raises(ConfigError, match="leave the flag out"):
            choose_quantization(config, "mxfp4")
    with pytest.raises(ConfigError, match="use one in bfloat16, float16 or float32, or one quantized by "
                                          "auto-round, awq, .*compressed-tensors, .*fp8, .*gguf, gptq, "):
        choose_quantization({"quantization_config": {"quant_method": "vptq"}}, None)
    with pytest.raises(ConfigError, match="let --model-path name the GGUF file"):
        choose_quantization({"quantization_config": {"quant_method": "gguf"}}, None)


def test_a_format_that_refuses_leaves_a_checkpoint_to_another(toy, monkeypatch):
    """Both read the same method: the second is asked where the first does not know the variant."""
    monkeypatch.setattr(toy.ToyInt8, "methods", ("compressed-tensors",))
    stated = {"quant_method": "compressed-tensors", "config_groups": {}}
    assert choose_quantization({"quantization_config": stated}, None) == toy.ToyInt8(stored=True)
    monkeypatch.setattr(toy.ToyInt8, "from_config", lambda stated: None)
    with pytest.raises(ConfigError, match="must have config_groups"):
        choose_quantization({"quantization_config": stated}, None)


# ---- a format in one file

SAVE = {"dense": lambda folder: save_model(folder, "Qwen2", vocab_size=VOCAB),
        "experts": lambda folder: save_moe(folder, "Qwen2Moe", vocab_size=VOCAB),
        "latent attention": lambda folder: save_deepseek(folder, 3, vocab_size=VOCAB),
        "experts with biases": lambda folder: save_moe(folder, "GptOss", vocab_size=VOCAB)}


@pytest.mark.parametrize("kind", SAVE)
def test_weights_in_int8_compute_nearly_what_the_model_does(tmp_path, toy, kind):
    exact = expected_logits(SAVE[kind](tmp_path), TOKENS)
    found = logits_of(tmp_path, quantization="toyint8")
    assert 1e-4 * exact.norm() < (found - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_checkpoint_in_int8_equals_weights_quantized_at_load(tmp_path, toy, kind):
    SAVE[kind](tmp_path)
    at_load = logits_of(tmp_path, quantization="toyint8")
    quantize_checkpoint(tmp_path, toy)
    assert torch.equal(logits_of(tmp_path), at_load)
    assert torch.equal(logits_of(tmp_path, quantization="toyint8"), at_load)
    with pytest.raises(ConfigError, match="--quantization fp8 is for checkpoints that are not quantized"):
        logits_of(tmp_path, quantization="fp8")


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_disaggregated_tokens_equal_unified(tmp_path, toy, bootstrap_port, kind):  # noqa: F811 (the fixture)
    SAVE[kind](tmp_path)
    quantize_checkpoint(tmp_path, toy)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 70, 6)]
    with pair_equal_to_unified(tmp_path, prompts, bootstrap_port, "fake") as (prefill, _):
        assert prefill.scheduler.sender.counters["kv_bytes_sent"] > 0


def test_tensors_of_another_type_are_refused_with_a_sentence(tmp_path, toy):
    SAVE["dense"](tmp_path)
    exact = load_file(tmp_path / "model.safetensors")
    quantize_checkpoint(tmp_path, toy)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": None}))
    with pytest.raises(ConfigError, match=r"_proj.weight in model.safetensors is int8, but by config.json it is not"):
        logits_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: exact[name]}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"{name} in model.safetensors is F32, but by config.json it is int8"):
        logits_of(tmp_path)


def test_dummy_weights_in_int8(tmp_path, toy):
    SAVE["dense"](tmp_path)
    quantize_checkpoint(tmp_path, toy)
    (tmp_path / "model.safetensors").unlink()
    found = [logits_of(tmp_path, load_format="dummy", random_seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(*found[:2]) and not torch.allclose(*found[1:]) and found[0].isfinite().all()
