"""Multi-head latent attention, as the engine and its attention backends see it."""

from __future__ import annotations

from dataclasses import dataclass

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
