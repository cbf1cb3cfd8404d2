"""Gemma against transformers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.tests.helpers.family_parity import check_family, check_greedy, save_random

CASES = {
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma 2": ("Gemma2", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 9,
                           "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gemma 2 without caps": ("Gemma2", {"head_dim": 12, "sliding_window": 24, "attn_logit_softcapping": None,
                                        "final_logit_softcapping": None, "hidden_activation": "gelu"}),
    "gemma 3": ("Gemma3", {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 9,
                           "sliding_window_pattern": 2, "rope_parameters": {
                               "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                               "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_transformers(tmp_path, case):
    name, config = CASES[case]
    check_family(tmp_path, name, config_name="Gemma3Text" if name == "Gemma3" else None, **config)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_of_a_model_with_images(tmp_path, prefix):
    """Newer and older names of tensors; the vision tower's are left out."""
    model = save_random(tmp_path, "Gemma3", config_name="Gemma3Text", head_dim=16, sliding_window=24)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "dtype": "float32"}))
    tensors = {name.replace("model.", prefix): tensor for name, tensor in load_file(
        tmp_path / "model.safetensors").items()}
    tensors["model.vision_tower.patch.weight"] = torch.ones(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    check_greedy(tmp_path, model, 131)
