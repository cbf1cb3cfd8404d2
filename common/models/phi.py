"""Phi-1, 1.5 and 2: attention and MLP in parallel behind one LayerNorm, biases, partial rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..api.errors import ConfigError
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
class PhiSpec:
    """Phi's own facts."""

    rope: RotarySpec
    layer_norm_eps: float
    hidden_act: str


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values, may_be_partial=True)
    if values["qk_layernorm"]:
        raise ConfigError("config.json states qk_layernorm, which is not supported: use a checkpoint without it.")
    return config.spec(rope.longest_context, PhiSpec(rope, values["layer_norm_eps"], values["hidden_act"]))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import PARALLEL, Blocks, HeadForm, dense_mlp, layer_norm
    from .decoder.self_attention import SelfAttention

    own: PhiSpec = spec.family
    return Blocks(own.rope, layer_norm(own.layer_norm_eps), partial(SelfAttention, qkv_bias=True, o_bias=True),
                  dense_mlp(bias=True, activation=own.hidden_act, gated=False), form=PARALLEL, head=HeadForm(bias=True))


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    from ..weights.fused_tensors import split_names

    return split_names({}, {".self_attn.dense.": ".self_attn.o_proj.", ".fc1.": ".up_proj.", ".fc2.": ".down_proj.",
                             "model.final_layernorm.": "model.norm."})


_DEFAULTS = {**COMMON, "vocab_size": 51200, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
             "max_position_embeddings": 2048, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": False,
             "partial_rotary_factor": 0.5, "eos_token_id": 2}

MODELS.register("PhiForCausalLM", "PhiModel")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="Phi-1, 1.5, 2",
                notes="attention and MLP in parallel, half of each head rotated"))
