"""Float8 checkpoints whose configuration stands elsewhere or says it otherwise: modelopt's and FBGEMM's."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from baton.common.api.errors import ConfigError
from baton.common.config.quantization import choose_quantization
from baton.common.config.server import CacheArgs
from baton.common.quantization.fp8 import Fp8
from baton.common.weights.kv_scales import is_kv_scale, read_kv_scales
from baton.common.weights.lazy import InMemory
from baton.tests.common.quantization.test_quantization import rms
from baton.tests.helpers.fp8_checkpoints import SIZES, save_float8, state
from baton.tests.helpers.small_models import expected_logits, logits_of, save_model

TOKENS = np.random.default_rng(2).integers(0, 97, 30)
MODELOPT = {"producer": {"name": "modelopt"}, "quantization": {
    "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.layers.0.mlp*"]}}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize("form", ["static", "channel"])
def test_checkpoints_compute_what_the_plain_model_does(tmp_path, form):
    plain = expected_logits(save_float8(tmp_path, form), TOKENS)
    exact = expected_logits(save_model(tmp_path / "exact", "Qwen3", **SIZES), TOKENS)
    if form == "static":
        state(tmp_path, None)
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(MODELOPT))
    else:
        state(tmp_path, FBGEMM)
    found = logits_of(tmp_path, TOKENS)
    assert rms(found - plain) < 0.1 * rms(plain - exact)
    flag = "modelopt" if form == "static" else "fbgemm_fp8"
    assert torch.equal(logits_of(tmp_path, TOKENS, quantization=flag), found)


def test_what_they_say():
    stated = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.router"]}
    read = choose_quantization({"quantization_config": stated}, None)
    assert (read.weights, read.activations, read.stored) == ("tensor", "static", True)
    assert read.for_layer("model.layers.3.mlp.router") is None and read.for_layer("model.layers.3.mlp.up_proj") == read
    assert choose_quantization({}, "w8a8_fp8") == Fp8("channel")
    assert choose_quantization({"quantization_config": FBGEMM}, "w8a8_fp8") == Fp8("channel", stored=True, ignored=(
        "lm_head",))
    for stated in ({"quant_method": "modelopt", "quant_algo": "NVFP4"},
                   {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
                       "targets": ["Linear"], "weights": {"type": "float", "num_bits": 4}}}}):
        with pytest.raises(ConfigError, match="GPUs newer than Hopper; use"):
            choose_quantization({"quantization_config": stated}, None)
    for flag in ("modelopt", "fbgemm_fp8"):
        with pytest.raises(ConfigError, match=f"--quantization {flag} is for checkpoints of"):
            choose_quantization({}, flag)


def test_names_of_kv_scales():
    """Of modelopt, compressed-tensors before and since 0.9, and AutoFP8."""
    names = ("k_proj.k_scale", "v_proj.v_scale"), ("k_proj.output_scale", "v_proj.output_scale"), (
        "k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"), ("qkv_proj.k_scale", "qkv_proj.v_scale")
    tensors = {f"model.layers.{layer}.self_attn.{name}": InMemory(torch.tensor([value]))
               for layer, pair in enumerate(names) for name, value in zip(pair, (0.5, 0.25))}
    tensors["model.layers.5.self_attn.kv_scale"] = InMemory(torch.tensor(0.125))
    source = type("Source", (), {"tensors": lambda self, slots: ((*item, "") for item in tensors.items())})()
    assert read_kv_scales(CacheArgs(), source, 6) == (*[(0.5, 0.25)] * 5, (0.125, 0.125))
    assert all(map(is_kv_scale, tensors)) and not is_kv_scale("model.layers.0.self_attn.q_proj.output_scale")
