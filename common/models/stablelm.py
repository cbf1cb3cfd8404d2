"""StableLM: Llama with LayerNorms, a quarter of each head rotated, and in some checkpoints parallel branches."""

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
class StableLmSpec:
    """StableLM's own facts. ``qkv_bias`` is that of q, k and v; ``head_norms``: each head of q and k has a norm of its
    own; ``parallel``: attention and MLP read one norm."""

    rope: RotarySpec
    layer_norm_eps: float
    hidden_act: str
    qkv_bias: bool
    head_norms: bool
    parallel: bool


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values, may_be_partial=True)
    own = StableLmSpec(rope, values["layer_norm_eps"], values["hidden_act"], bool(values["use_qkv_bias"]),
                       bool(values["qk_layernorm"]), bool(values["use_parallel_residual"]))
    return config.spec(rope.longest_context, own)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import PARALLEL, PRE_NORM, Blocks, dense_mlp, layer_norm
    from .decoder.qkv_steps import each_head_norms
    from .decoder.self_attention import SelfAttention

    own: StableLmSpec = spec.family
    norms = each_head_norms(own.layer_norm_eps, ("q_layernorm", "k_layernorm"), "norms.{}")
    attention = partial(SelfAttention, qkv_bias=own.qkv_bias, qkv_step=norms if own.head_norms else None)
    return Blocks(own.rope, layer_norm(own.layer_norm_eps), attention, dense_mlp(activation=own.hidden_act),
                  form=PARALLEL if own.parallel else PRE_NORM)


_DEFAULTS = {**COMMON, "vocab_size": 50304, "hidden_size": 2560, "intermediate_size": 6912, "num_key_value_heads": 32,
             "max_position_embeddings": 4096, "layer_norm_eps": 1e-5, "use_qkv_bias": False, "qk_layernorm": False,
             "use_parallel_residual": False, "partial_rotary_factor": 0.25, "eos_token_id": 0}

MODELS.register("StableLmForCausalLM", "StableLmForSequenceClassification", "StableLmModel")(
    ModelFamily(read, blocks, _DEFAULTS, title="StableLM",
                notes="LayerNorms, a quarter of each head rotated; some with parallel branches, norms of heads"))
