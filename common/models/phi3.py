"""Phi-3, 3.5 and 4: Llama with fused projections, rotary embeddings of a part of each head, and LongRoPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope
from ..config.window import window_of_all_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class Phi3Spec:
    """Phi-3's own facts."""

    rope: RotarySpec
    rms_norm_eps: float
    hidden_act: str


def read(config: ModelConfig) -> ModelSpec:
    values = config.values
    rope = read_rope({**values, "rope_scaling": _as_longrope(values.get("rope_scaling"))}, may_be_partial=True)
    own = Phi3Spec(rope, values["rms_norm_eps"], values["hidden_act"])
    return config.spec(rope.longest_context, own, windows=window_of_all_layers(values))


def _as_longrope(scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """Returns the scaling under its later name: the first checkpoints call it "su" or "yarn"."""
    return None if scaling is None else {**scaling, "rope_type": "longrope"}


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, rms_norm
    from .decoder.self_attention import SelfAttention

    own: Phi3Spec = spec.family
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), SelfAttention, dense_mlp(activation=own.hidden_act))


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    from ..weights.fused_tensors import qkv_rows, split_names

    return split_names({"qkv_proj": qkv_rows(spec), "gate_up_proj": {"gate_proj": spec.intermediate_size,
                                                                     "up_proj": spec.intermediate_size}})


_DEFAULTS = {**COMMON, "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192, "rms_norm_eps": 1e-5,
             "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "eos_token_id": 32000}

MODELS.register("Phi3ForCausalLM", "Phi3ForSequenceClassification", "Phi3Model")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="Phi-3, 3.5, 4",
                notes="fused projections, LongRoPE by the context length that the server is started with"))
