"""Helium: Llama with interleaved rotary embeddings."""

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
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class HeliumSpec:
    """Helium's own facts. ``attention_bias`` is that of q, k and v."""

    rope: RotarySpec
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    own = HeliumSpec(rope, values["rms_norm_eps"], values["hidden_act"], bool(values["attention_bias"]),
                     bool(values["mlp_bias"]))
    return config.spec(rope.longest_context, own)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, rms_norm
    from .decoder.self_attention import SelfAttention

    own: HeliumSpec = spec.family
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), partial(SelfAttention, qkv_bias=own.attention_bias),
                  dense_mlp(bias=own.mlp_bias, activation=own.hidden_act))


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    from ..weights.interleaved_rotary import halves_of

    return halves_of(spec, spec.head_dim)


_DEFAULTS = {**COMMON, "vocab_size": 48000, "hidden_size": 2560, "intermediate_size": 7040, "num_hidden_layers": 24,
             "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096,
             "rms_norm_eps": 1e-8, "rope_theta": 100000.0, "attention_bias": False, "mlp_bias": False,
             "eos_token_id": 2}

MODELS.register("HeliumForCausalLM", "HeliumForSequenceClassification", "HeliumModel")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="Helium",
                notes="interleaved rotary embeddings"))
