"""Phi-3.5-MoE: LayerNorms, biases, and mixtures of experts whose two experts a SparseMixer chooses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.moe import MoESpec
from ..config.rope import RotarySpec, read_rope
from ..config.window import window_of_all_layers
from . import mixtral
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class PhimoeSpec:
    """Phi-3.5-MoE's own facts. ``attention_bias`` is that of q, k, v and the output."""

    rope: RotarySpec
    norm_eps: float
    attention_bias: bool
    lm_head_bias: bool


def read(config: ModelConfig) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    moe = MoESpec.in_every_layer(values, scoring="sparsemixer", jitter=values["router_jitter_noise"])
    own = PhimoeSpec(rope, values["rms_norm_eps"], bool(values["attention_bias"]), bool(values["lm_head_bias"]))
    return config.spec(rope.longest_context, own, windows=window_of_all_layers(values), moe=moe)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, HeadForm, layer_norm
    from .decoder.moe import mixed_mlp
    from .decoder.self_attention import SelfAttention

    own: PhimoeSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias)
    return Blocks(own.rope, layer_norm(own.norm_eps), attention, mixed_mlp(parallel.experts),
                  head=HeadForm(bias=own.lm_head_bias))


def tensor_parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
    """As Mixtral's; transformers calls the gate a router."""
    return mixtral.tensor_parts(name.replace(".mlp.router.", ".mlp.gate."), tensor)


_DEFAULTS = {
    **COMMON, "vocab_size": 32064, "intermediate_size": 6400, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "num_experts": 16,
    "num_experts_per_tok": 2, "router_jitter_noise": 0.01, "attention_bias": False, "lm_head_bias": False,
    "sliding_window": None, "eos_token_id": 2}

MODELS.register("PhimoeForCausalLM", "PhiMoEForCausalLM", "PhimoeModel")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts, title="Phi-3.5-MoE",
                notes="mixtures of experts, chosen by a SparseMixer"))
