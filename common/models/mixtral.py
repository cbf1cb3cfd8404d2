"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.moe import MoESpec
from ..config.rope import RotarySpec, read_rope
from ..config.window import window_of_all_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class MixtralSpec:
    """Mixtral's own facts."""

    rope: RotarySpec
    rms_norm_eps: float


def read(config: ModelConfig) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    moe = MoESpec.in_every_layer(values)
    return config.spec(rope.longest_context, MixtralSpec(rope, values["rms_norm_eps"]),
                       windows=window_of_all_layers(values), moe=moe)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, rms_norm
    from .decoder.moe import mixed_mlp
    from .decoder.self_attention import SelfAttention

    own: MixtralSpec = spec.family
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), SelfAttention, mixed_mlp(parallel.experts))


_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def tensor_parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
    """Gives experts the names that other families' have, and splits those that transformers stacked."""
    from ..weights.expert_names import by_expert

    if ".block_sparse_moe." in name:
        name = name.replace(".block_sparse_moe.", ".mlp.")
        name = re.sub(r"(\.experts\.\d+)\.(w[123])\.", lambda found: f"{found[1]}.{_PROJECTIONS[found[2]]}.", name)
    return by_expert(name, tensor)


_DEFAULTS = {**COMMON, "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072,
             "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_experts": 8, "num_experts_per_tok": 2,
             "eos_token_id": 2}

MODELS.register("MixtralForCausalLM", "MixtralForSequenceClassification", "MixtralModel")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts, title="Mixtral", notes="mixtures of experts"))
