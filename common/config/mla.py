"""Multi-head latent attention, as a checkpoint's configuration describes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..api.errors import ConfigError


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A token leaves one latent of ``kv_lora_rank`` values in each layer, of which every head makes its key
    (``nope_dim``) and value (``v_dim``), and one key part of ``rope_dim`` values with rotary embedding,
    shared by all heads. Queries come from a latent of ``q_lora_rank``, or straight from the hidden state (None).
    ``scale`` multiplies scores. ``interleaved``: RoPE rotates neighbouring elements (GPT-J style), else element i with
    i + rope_dim / 2 (NeoX style).
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    scale: float
    interleaved: bool = True

    def __post_init__(self) -> None:
        if min(self.kv_lora_rank, self.nope_dim, self.rope_dim, self.v_dim) < 1 or self.rope_dim % 2:
            raise ConfigError(f"config.json has kv_lora_rank {self.kv_lora_rank}, qk_nope_head_dim {self.nope_dim}, "
                              f"qk_rope_head_dim {self.rope_dim} and v_head_dim {self.v_dim}: they must be positive, "
                              f"and the rotary one even.")

    @property
    def latent_dim(self) -> int:
        """Values that the KV cache stores for a token in a layer."""
        return self.kv_lora_rank + self.rope_dim

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim


def latent_attention(config: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> MLASpec:
    """Reads DeepSeek's configuration; ``scaling`` is that of the rotary embeddings (``ModelSpec.rope_scaling``)."""
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    return MLASpec(
        q_lora_rank=config.get("q_lora_rank") or None, kv_lora_rank=config["kv_lora_rank"], nope_dim=nope,
        rope_dim=rope, v_dim=config["v_head_dim"], scale=(nope + rope) ** -0.5 * _magnitude(scaling) ** 2,
        interleaved=bool(config.get("rope_interleave", True)))


def _magnitude(scaling: Mapping[str, Any] | None) -> float:
    """Returns YaRN's factor of queries and keys for a stretched context (arXiv:2309.00071, section 3.4). It applies to
    all of their values, while the rotary table can scale only those that it rotates."""
    if not scaling or not scaling.get("mscale_all_dim") or scaling["factor"] <= 1:
        return 1.0
    result: float = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0
    return result
