"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.moe import MoESpec
from ..config.rope import RotarySpec, read_rope
from ..config.window import window_of_all_layers
from .registry import architectures_of, register_model

if TYPE_CHECKING:
    import torch

    from ..distributed.parallel import Parallel
    from .decoder.causal_lm import CausalLM


@dataclass(frozen=True)
class MixtralSpec:
    """Mixtral's own facts."""

    rope: RotarySpec
    rms_norm_eps: float


def read(config: ModelConfig) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    moe = MoESpec(num_experts=values["num_experts"], top_k=values["num_experts_per_tok"],
                  intermediate_size=values["intermediate_size"], layers=tuple(range(values["num_hidden_layers"])))
    return config.spec(rope.longest_context, MixtralSpec(rope, values["rms_norm_eps"]),
                       windows=window_of_all_layers(values), moe=moe)


def build(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> CausalLM:
    from .decoder.causal_lm import CausalLM
    from .decoder.layer import Blocks, SelfAttention, rms_norm
    from .decoder.moe import mixed_mlp

    own: MixtralSpec = spec.family
    return CausalLM(spec, parallel, dtype, device, Blocks(
        own.rope, rms_norm(own.rms_norm_eps), SelfAttention, mixed_mlp(parallel.experts)))


register_model(*architectures_of("Mixtral"), read=read, build=build, defaults={
    **COMMON, "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 2})
