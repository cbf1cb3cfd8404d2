"""Small random DeepSeek models, saved by transformers."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, rms_norm
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV3Model,
)

BASE = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "eos_token_id": 7,
        "kv_lora_rank": 24, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
        "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 3,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
V3 = {"q_lora_rank": 40, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "n_shared_experts": 1}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 1.0}


def save_deepseek(folder: Path, version: int, **changes: Any) -> Any:
    """A model with random weights, norms and the routers' biases included, saved to ``folder``."""
    torch.manual_seed(0)
    make_config, make_model = {2: (DeepseekV2Config, DeepseekV2ForCausalLM),
                               3: (DeepseekV3Config, DeepseekV3ForCausalLM)}[version]
    config = make_config(**{**BASE, **(V3 if version == 3 else {}), **changes})
    config._attn_implementation = "eager"
    model = make_model(config).eval()
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "inv_freq" not in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


def save_with_predictors(folder: Path, count: int, *, echo: float = 0.0, **changes: Any) -> list[Any]:
    """A V3 model of three layers with ``count`` layers of multi-token prediction. Returns transformers' model, then
    ``foretell`` of each predictor: ``(hidden [T, hidden], following ids [T]) -> rows [T, hidden]``. The larger
    ``echo``, the rather is what comes next foretold to come once more."""
    model = save_deepseek(folder, 3, num_hidden_layers=3 + count, **changes)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    foretell = []
    for index in range(3, 3 + count):
        block = DeepseekV3Model(copy_of(model.config, num_hidden_layers=1, first_k_dense_replace=0)).eval()
        block.layers[0].load_state_dict(model.model.layers[index].state_dict())
        with torch.no_grad():
            block.norm.weight.uniform_(0.5, 1.5)
            own = {"enorm.weight": torch.rand(48) + 0.5, "hnorm.weight": torch.rand(48) + 0.5,
                   "eh_proj.weight": torch.randn(48, 96) * 0.1 + echo * torch.eye(96)[48:],
                   "shared_head.norm.weight": block.norm.weight.clone()}
        shared = {"embed_tokens.weight": model.model.embed_tokens.weight.detach().clone(),
                  "shared_head.head.weight": model.lm_head.weight.detach().clone()}
        tensors |= {f"model.layers.{index}.{name}": value.contiguous() for name, value in (own | shared).items()}
        foretell.append(partial(_foretold, model.model.embed_tokens, block, own))
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3,
                                                    "num_nextn_predict_layers": count}))
    model.config.num_hidden_layers = 3  # transformers goes through so many
    return [model, *foretell]


def copy_of(config: Any, **changes: Any) -> Any:
    other = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(other, name, value)
    return other


def _foretold(embed: Any, block: Any, own: dict[str, torch.Tensor], hidden: torch.Tensor,
              following: torch.Tensor) -> torch.Tensor:
    parts = [rms_norm(x, x.shape[-1:], own[name], block.config.rms_norm_eps)
             for x, name in ((embed(following), "enorm.weight"), (hidden, "hnorm.weight"))]
    joined = linear(torch.cat(parts, -1), own["eh_proj.weight"])
    return block(inputs_embeds=joined[None]).last_hidden_state[0]
