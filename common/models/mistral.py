"""Mistral: Llama without biases, with one sliding window in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.rope import RotarySpec, read_rope
from ..config.window import window_of_all_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class MistralSpec:
    """Mistral's own facts."""

    rope: RotarySpec
    rms_norm_eps: float


def read(config: ModelConfig) -> ModelSpec:
    check_silu(config)
    rope = read_rope(config.values)
    return config.spec(rope.longest_context, MistralSpec(rope, config.values["rms_norm_eps"]),
                       windows=window_of_all_layers(config.values))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, rms_norm
    from .decoder.self_attention import SelfAttention

    own: MistralSpec = spec.family
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), SelfAttention, dense_mlp())


_DEFAULTS = {**COMMON, "num_key_value_heads": 8, "intermediate_size": 14336, "max_position_embeddings": 131072,
             "sliding_window": 4096, "eos_token_id": 2}

MODELS.register("MistralForCausalLM", "MistralForSequenceClassification", "MistralModel")(
    ModelFamily(read, blocks, _DEFAULTS,
                title="Mistral",
                notes="one sliding window in every layer"))
