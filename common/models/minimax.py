"""MiniMax-M2: norms over whole rows of queries and keys, and mixtures of experts that are scored by sigmoid."""

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
from ..config.window import no_window
from . import mixtral
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class MiniMaxSpec:
    """MiniMax-M2's own facts. A head's first ``rotary_dim`` values are rotated."""

    rope: RotarySpec
    rms_norm_eps: float
    rotary_dim: int


def read(config: ModelConfig) -> ModelSpec:
    check_silu(config)
    values = config.values
    rope = read_rope(values, may_be_partial=True)
    moe = MoESpec.in_every_layer(values, scoring="sigmoid", correction_bias=True)
    own = MiniMaxSpec(rope, values["rms_norm_eps"], values.get("rotary_dim") or rope.rotary_dim(config.head_dim))
    return config.spec(rope.longest_context, own, windows=no_window(values), moe=moe)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, rms_norm
    from .decoder.moe import mixed_mlp
    from .decoder.qkv_steps import row_norms
    from .decoder.self_attention import SelfAttention

    own: MiniMaxSpec = spec.family
    attention = partial(SelfAttention, qkv_step=row_norms(own.rms_norm_eps))
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention, mixed_mlp(parallel.experts), own.rotary_dim)


def tensor_parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
    """As Mixtral's, with the router's bias below its weight."""
    for own_name, part in mixtral.tensor_parts(name, tensor):
        yield own_name.replace(".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"), part


_DEFAULTS = {
    **COMMON, "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608,
    "rope_theta": 5000000.0, "num_experts": 256, "num_experts_per_tok": 8, "eos_token_id": 200020}

MODELS.register("MiniMaxM2ForCausalLM", "MiniMaxM2Model")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts, title="MiniMax-M2",
                notes="mixtures of experts; norms over whole rows of queries and keys"))
