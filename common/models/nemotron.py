"""Nemotron-3 and 4, Minitron: LayerNorms whose weights are stored less 1, plain MLPs of squared ReLUs, half of each
head rotated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class NemotronSpec:
    """Nemotron's own facts. ``attention_bias`` is that of q, k, v and the output."""

    rope: RotarySpec
    norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values, may_be_partial=True)
    own = NemotronSpec(rope, values["norm_eps"], values["hidden_act"], bool(values["attention_bias"]),
                       bool(values["mlp_bias"]))
    return config.spec(rope.longest_context, own)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, layer_norm
    from .decoder.self_attention import SelfAttention

    own: NemotronSpec = spec.family
    return Blocks(own.rope, layer_norm(own.norm_eps, offset=1.0),
                  partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias),
                  dense_mlp(bias=own.mlp_bias, activation=own.hidden_act, gated=False))


_DEFAULTS = {**COMMON, "vocab_size": 256000, "hidden_size": 6144, "intermediate_size": 24576,
             "num_attention_heads": 48, "max_position_embeddings": 4096, "hidden_act": "relu2", "norm_eps": 1e-5,
             "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 0.5, "eos_token_id": 3}

MODELS.register("NemotronForCausalLM", "NemotronForSequenceClassification", "NemotronModel")(
    ModelFamily(read, blocks, _DEFAULTS, title="Nemotron-4, Minitron",
                notes="LayerNorms, plain MLPs of squared ReLUs, half of each head rotated"))
