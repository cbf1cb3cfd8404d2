"""Families with LayerNorms, many of them with attention and MLP in parallel, against transformers."""

from __future__ import annotations

import pytest

from baton.tests.helpers.family_parity import check_family

CASES = {
    "phi 2": ("Phi", {"num_key_value_heads": 4, "rope_parameters": {"rope_theta": 500.0, "rope_type": "default",
                                                                   "partial_rotary_factor": 0.5}}),
    "stablelm": ("StableLm", {"hidden_size": 64, "use_qkv_bias": True}),
    "stablelm 12b": ("StableLm", {"hidden_size": 64, "qk_layernorm": True, "use_parallel_residual": True}),
    "command-r": ("Cohere", {"logit_scale": 0.3}),
    "command-r plus": ("Cohere", {"logit_scale": 0.3, "use_qk_norm": True, "attention_bias": True}),
    "command-r 7b": ("Cohere2", {"logit_scale": 0.3, "sliding_window": 24, "sliding_window_pattern": 2}),
    "starcoder 2": ("Starcoder2", {"sliding_window": 20}),
    "gpt-neox": ("GPTNeoX", {"hidden_size": 64}),
    "gpt-neox in sequence": ("GPTNeoX", {"hidden_size": 64, "use_parallel_residual": False, "attention_bias": False}),
    "nemotron": ("Nemotron", {"attention_bias": True}),
    "nemotron with biases": ("Nemotron", {"mlp_bias": True, "hidden_act": "gelu", "rope_parameters": {
        "rope_theta": 500.0, "rope_type": "default", "partial_rotary_factor": 0.25}}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path, case):
    name, config = CASES[case]
    check_family(tmp_path, name, **config)
