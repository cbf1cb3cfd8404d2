"""Small random Nemotron models, whose family tests/helpers/nemotron_family.py registers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import NemotronConfig, NemotronForCausalLM

from baton.tests.helpers import nemotron_family

__all__ = ["nemotron_family", "save_nemotron"]


def save_nemotron(folder: Path, architecture: str = "OwnNemotronForCausalLM", **changes: Any) -> NemotronForCausalLM:
    """Saves a model with random weights to ``folder``, norms and biases included, as one of this ``architecture``: by
    default the user's."""
    torch.manual_seed(0)
    config = NemotronConfig(**{
        "vocab_size": 131, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "eos_token_id": 7, "norm_eps": 1e-4,
        **changes})
    config._attn_implementation = "eager"
    model = NemotronForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "architectures": [architecture]}))
    return model
