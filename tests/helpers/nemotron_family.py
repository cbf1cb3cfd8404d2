"""A model family that a user registers: Nemotron, which rotates half of a head, and has another norm and activation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import baton
from baton.common.config.model import ModelSpec
from baton.common.config.model_config import ModelConfig
from baton.common.config.rope import RotarySpec, read_rope

if TYPE_CHECKING:
    from baton.common.distributed.parallel import Parallel
    from baton.common.models.decoder.blocks import Blocks


@dataclass(frozen=True)
class NemotronSpec:
    rope: RotarySpec
    norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    hidden_act: str


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values, may_be_partial=True)
    return config.spec(rope.longest_context, NemotronSpec(
        rope, values["norm_eps"], values["attention_bias"], values["mlp_bias"], values["hidden_act"]))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from baton.common.models.decoder.blocks import Blocks, dense_mlp, layer_norm
    from baton.common.models.decoder.self_attention import SelfAttention

    own: NemotronSpec = spec.family
    return Blocks(
        own.rope, layer_norm(own.norm_eps, offset=1.0),
        partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias),
        dense_mlp(bias=own.mlp_bias, activation=own.hidden_act, gated=False))


baton.register_model("OwnNemotronForCausalLM", read=read, blocks=blocks, defaults={
    "hidden_act": "relu2", "norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 0.5,
    "tie_word_embeddings": False})
