"""Tiny random hybrid models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear

MAMBA = {"mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_n_groups": 2, "mamba_d_state": 8,
         "num_hidden_layers": 2, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "key_multiplier": 0.7,
         "mlp_multipliers": [0.9, 1.2], "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.8,
         "ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.5, 1.5, 0.9, 1.1, 0.7]}
"""A tiny Falcon-H1."""
LAYERS = ["linear_attention", "full_attention", "linear_attention"]


def save_hybrid(folder: Path, **changes: Any) -> Any:
    """Saves a Qwen3-Next whose random weights are large, so that its answers differ and hardly ever depend on a tie;
    returns transformers' model."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
             "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2,
             "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 0,
             "layer_types": LAYERS, "max_position_embeddings": 1024, "eos_token_id": None, "initializer_range": 0.3,
             "mlp_only_layers": [0, 1, 2]}
    config = transformers.Qwen3NextConfig(**{**sizes, **changes})
    model = transformers.Qwen3NextForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4, -1)  # states that last
    model.save_pretrained(folder)
    return model


def add_draft_layer(folder: Path, model: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Adds a layer of multi-token prediction to a Qwen3-Next in ``folder``; returns ``draft``: ``(hidden [T,
    hidden], following ids [T]) -> rows [T, hidden]``."""
    config = transformers.Qwen3NextConfig.from_pretrained(folder, num_hidden_layers=1, layer_types=["full_attention"])
    config._attn_implementation = "eager"
    block = transformers.Qwen3NextModel(config).eval()
    size = config.hidden_size
    norms = [type(block.norm)(size, config.rms_norm_eps) for _ in range(2)]
    projection = torch.randn(size, 2 * size) * 0.2
    with torch.no_grad():
        for norm in (block.norm, *norms):
            norm.weight.uniform_(-0.5, 0.5)
    own = {"fc.weight": projection, "norm.weight": block.norm.weight, "pre_fc_norm_embedding.weight": norms[0].weight,
           "pre_fc_norm_hidden.weight": norms[1].weight,
           **{f"layers.0.{name}": value for name, value in block.layers[0].state_dict().items()}}
    path = folder / "model.safetensors"
    tensors = load_file(path) | {f"mtp.{name}": value.detach().contiguous().clone() for name, value in own.items()}
    path.unlink()
    save_file(tensors, path)

    @torch.inference_mode()
    def draft(hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        joined = torch.cat((norms[0](model.model.embed_tokens(following)), norms[1](hidden)), -1)
        return block(inputs_embeds=linear(joined, projection)[None]).last_hidden_state[0]

    return draft
