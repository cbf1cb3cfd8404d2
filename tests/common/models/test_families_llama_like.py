"""Families that are close to Llama, against transformers."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from baton.tests.helpers.family_parity import check_family, check_greedy, save_random

LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [2.0, 3.0, 5.0, 9.0],
        "rope_theta": 500.0, "partial_rotary_factor": 0.5}
CASES = {
    "granite": ("Granite", {"attention_multiplier": 0.5, "logits_scaling": 3.0, "embedding_multiplier": 2.0,
                            "residual_multiplier": 0.3}),
    "granite with biases": ("Granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "phi 3": ("Phi3", {"sliding_window": 20}),
    "phi 4 mini": ("Phi3", {"hidden_size": 64, "original_max_position_embeddings": 256, "tie_word_embeddings": True,
                            "rope_parameters": {**LONG, "original_max_position_embeddings": 256}}),
    "phi 3.5": ("Phi3", {"hidden_size": 64, "original_max_position_embeddings": 1, "rope_parameters": {
        **LONG, "original_max_position_embeddings": 1, "attention_factor": 1.2}}),
    "exaone 4": ("Exaone4", {"sliding_window": 24, "layer_types": [
        "sliding_attention", "sliding_attention", "full_attention"]}),
    "exaone 4 without windows": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "smollm 3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm 3 with windows": ("SmolLM3", {"no_rope_layer_interval": 2, "use_sliding_window": True,
                                          "sliding_window": 24, "attention_bias": True, "mlp_bias": True}),
    "helium": ("Helium", {"head_dim": 12, "num_key_value_heads": 4}),
    "olmo": ("Olmo", {"clip_qkv": 0.4}),
    "olmo 2": ("Olmo2", {"attention_bias": True}),
    "olmo 3": ("Olmo3", {"sliding_window": 24, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"], "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0,
                               "original_max_position_embeddings": 64},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path, case):
    name, config = CASES[case]
    check_family(tmp_path, name, **config)


def test_replicated_heads_count_once_in_norms_of_rows(tmp_path):
    """Four ranks have two KV heads twice."""
    check_family(tmp_path, "Olmo2", tp=4)


NAMES = {"model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f", "model.layers": "transformer.h",
         "self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "input_layernorm": "ln_1",
         "post_attention_layernorm": "ln_2", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj"}
FIELDS = {"num_hidden_layers": "num_layers", "hidden_act": "activation_function", "rms_norm_eps": "layer_norm_epsilon"}


def test_exaone_3_is_llama_by_other_names(tmp_path):
    model = save_random(tmp_path, "Llama", tie_word_embeddings=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config = {FIELDS.get(name, name): value for name, value in config.items()}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["ExaoneForCausalLM"]}))
    tensors = load_file(tmp_path / "model.safetensors")
    for old, new in NAMES.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    check_greedy(tmp_path, model, 131)
