"""Mistral's own checkpoints: ``params.json`` beside ``consolidated*.safetensors``, without a config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...api.errors import ConfigError
from ..description import DESCRIPTIONS
from ..server import ModelArgs
from ..weight_files import is_mistral

_NAMES = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads",
          "n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps",
          "vocab_size": "vocab_size", "head_dim": "head_dim", "rope_theta": "rope_theta"}
_MAX_POSITIONS = 128_000
"""What Mistral's models of this format were trained with, where ``max_seq_len`` and ``max_position_embeddings`` are
missing."""


@DESCRIPTIONS.register("mistral")
def describe_mistral(args: ModelArgs, path: Path) -> dict[str, Any] | None:
    """Returns the values of config.json that follow from ``params.json``; None for other checkpoints. Raises
    ConfigError for models with parts that Mistral's language models do not have."""
    if not is_mistral(path):
        return None
    from ..checkpoint import read_json

    params = read_json(path / "params.json") or {}
    if unknown := sorted({"vision_encoder", "multimodal", "llama_4_scaling", "yarn", "quantization"} & {
            name for name, value in params.items() if value}):
        raise ConfigError(f"{path}/params.json has {', '.join(unknown)}, which is not supported in Mistral's own "
                          "format: use the checkpoint with a config.json.")
    if missing := sorted({"dim", "n_layers", "n_heads", "hidden_dim", "vocab_size"} - params.keys()):
        raise ConfigError(f"{path}/params.json lacks {', '.join(missing)}.")
    values = {own: params[name] for name, own in _NAMES.items() if params.get(name) is not None}
    longest = params.get("max_position_embeddings") or params.get("max_seq_len") or _MAX_POSITIONS
    moe = params.get("moe")
    return {"sliding_window": _window(params), **values, "max_position_embeddings": longest,
            "architectures": ["MixtralForCausalLM" if moe else "MistralForCausalLM"],
            "model_type": "mixtral" if moe else "mistral", "hidden_act": "silu", "torch_dtype": "bfloat16",
            "tie_word_embeddings": bool(params.get("tied_embeddings")), "bos_token_id": 1, "eos_token_id": 2,
            **({"num_local_experts": moe["num_experts"], "num_experts_per_tok": moe["num_experts_per_tok"]}
               if moe else {})}


def _window(params: dict[str, Any]) -> int | None:
    stated = params.get("sliding_window")
    return stated if isinstance(stated, int) else None
