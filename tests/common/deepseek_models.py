"""Small random DeepSeek models, saved by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

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
