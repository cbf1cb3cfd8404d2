"""Llama: the dense pre-norm decoder that the other families vary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.rope import RotarySpec, read_rope
from ..config.window import no_window
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class LlamaSpec:
    """Llama's own facts. ``attention_bias`` is that of q, k and v. The reward of a reward model is that of so many
    ``reward_attributes``."""

    rope: RotarySpec
    rms_norm_eps: float
    attention_bias: bool
    o_bias: bool
    mlp_bias: bool
    reward_attributes: int = 0


def read(config: ModelConfig) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    bias = bool(values["attention_bias"])
    own = LlamaSpec(rope, values["rms_norm_eps"], bias, bias, bool(values["mlp_bias"]))
    return config.spec(rope.longest_context, own, windows=no_window(values))


def read_reward_model(config: ModelConfig) -> ModelSpec:
    """Reads a model whose labels are pairs, one for each attribute of a reward."""
    spec = read(config)
    return replace(spec, num_labels=1, family=replace(spec.family, reward_attributes=spec.num_labels // 2))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, rms_norm
    from .decoder.self_attention import SelfAttention

    own: LlamaSpec = spec.family
    return Blocks(own.rope, rms_norm(own.rms_norm_eps),
                  partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.o_bias), dense_mlp(bias=own.mlp_bias))


def reward_blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from ..layers.classifier_head import WeightedRewardHead

    attributes = spec.family.reward_attributes
    return replace(blocks(spec, parallel),
                   classifier=lambda _, size, allocate: WeightedRewardHead(attributes, size, allocate))


_DEFAULTS = {**COMMON, "intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False,
             "mlp_bias": False, "eos_token_id": 2}

MODELS.register("LlamaForCausalLM", "LlamaForSequenceClassification", "LlamaModel", "LlamaEmbeddingModel")(
    ModelFamily(read, blocks, _DEFAULTS,
                title="Llama",
                notes="dense"))
MODELS.register("LlamaForSequenceClassificationWithNormal_Weights")(
    ModelFamily(read_reward_model, reward_blocks, {**_DEFAULTS, "num_labels": 10},
                title="Llama with a weighted reward", notes="a reward of several attributes, weighted by the prompt"))
