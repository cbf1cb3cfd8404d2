"""Defaults of transformers' configuration classes (5.17), family by family, for keys that a config.json lacks.

Checkpoints that were written by hand or by other tools leave keys out, and must mean here what they mean there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of one number in families and versions of transformers; it is stored under the first."""

_COMMON: dict[str, Any] = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False, "rope_theta": 10000.0,
}
_QWEN: dict[str, Any] = {
    **_COMMON, "num_key_value_heads": 32, "intermediate_size": 22016, "vocab_size": 151936,
    "max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28,
}
_QWEN_MOE: dict[str, Any] = {
    **_QWEN, "hidden_size": 2048, "num_hidden_layers": 24, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
_DEEPSEEK: dict[str, Any] = {
    **_COMMON, "attention_bias": False, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "Llama": {**_COMMON, "intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False,
              "mlp_bias": False, "eos_token_id": 2},
    "Mistral": {**_COMMON, "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072,
                "sliding_window": 4096, "eos_token_id": 2},
    "Qwen2": _QWEN,
    "Qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
    "Mixtral": {**_COMMON, "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_experts": 8, "num_experts_per_tok": 2,
                "eos_token_id": 2},
    "Qwen2Moe": {**_QWEN_MOE, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632,
                 "qkv_bias": True, "num_experts": 60, "moe_intermediate_size": 1408,
                 "shared_expert_intermediate_size": 5632},
    "Qwen3Moe": {**_QWEN_MOE, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144,
                 "attention_bias": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "GptOss": {**_COMMON, "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64,
               "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088,
               "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128,
               "num_experts": 128, "num_experts_per_tok": 4, "rope_theta": 150000.0, "rope_parameters": {
                   "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                   "original_max_position_embeddings": 4096}},
    "DeepseekV2": {**_DEEPSEEK, "intermediate_size": 11008, "vocab_size": 102400, "max_position_embeddings": 2048,
                   "mlp_bias": False, "moe_intermediate_size": 1407, "num_experts": 64, "n_shared_experts": 2,
                   "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
                   "topk_method": "greedy", "eos_token_id": 2},
    "DeepseekV3": {**_DEEPSEEK, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
                   "num_key_value_heads": 128, "intermediate_size": 18432, "vocab_size": 129280,
                   "max_position_embeddings": 4096, "moe_intermediate_size": 2048, "num_experts": 256,
                   "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8,
                   "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_interleave": True,
                   "eos_token_id": 1},
}


def with_defaults(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Returns ``config`` with the defaults of missing keys; a null stays, since it differs from a missing key."""
    defaults = DEFAULTS[family]
    filled = {**defaults, **config}
    counts = [config[name] for name in _NUM_EXPERTS if name in config]
    if counts:
        filled["num_experts"] = next(filter(None, counts), None)
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        filled["rope_parameters"] = defaults.get("rope_parameters")
    return filled
