"""Qwen2 and Qwen3, dense and with mixtures of experts: Qwen2 has biases of q, k and v, Qwen3 norms of their heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.moe import MoESpec
from ..config.rope import RotarySpec, read_rope
from ..config.window import Windows, window_of_flagged_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class QwenSpec:
    """Qwen's own facts. ``attention_bias`` is that of q, k and v; ``qk_norm``: heads of queries and keys are normed."""

    rope: RotarySpec
    rms_norm_eps: float
    attention_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool


Slides = Callable[[int, int], bool]
"""Returns whether a layer has the window: of its index and ``max_window_layers``, where ``layer_types`` are missing."""


def read_qwen2(config: ModelConfig, *, slides: Slides, has_experts: bool) -> ModelSpec:
    bias = bool(config.values.get("qkv_bias", True))
    return _read(config, slides, has_experts, qkv_bias=bias, o_bias=False, mlp_bias=False, qk_norm=False)


def read_qwen3(config: ModelConfig, *, slides: Slides, has_experts: bool) -> ModelSpec:
    bias, mlp_bias = bool(config.values["attention_bias"]), bool(config.values.get("mlp_bias", False))
    return _read(config, slides, has_experts, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, qk_norm=True)


def _read(config: ModelConfig, slides: Slides, has_experts: bool, *, qkv_bias: bool, o_bias: bool, mlp_bias: bool,
          qk_norm: bool) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    own = QwenSpec(rope, values["rms_norm_eps"], qkv_bias, o_bias, mlp_bias, qk_norm)
    return config.spec(rope.longest_context, own, windows=_windows(values, slides),
                       moe=read_experts(values) if has_experts else None)


def _windows(values: Mapping[str, Any], slides: Slides) -> Windows:
    if not values["use_sliding_window"]:
        return ()
    last = values["max_window_layers"]
    return window_of_flagged_layers(values, [slides(layer, last) for layer in range(values["num_hidden_layers"])])


def read_experts(values: Mapping[str, Any]) -> MoESpec | None:
    """Reads Qwen2-MoE's or Qwen3-MoE's experts; None where no layer has any."""
    dense, step = values.get("mlp_only_layers") or (), values["decoder_sparse_step"]
    layers = tuple(i for i in range(values["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)
    if not layers or not values["num_experts"]:
        return None
    return MoESpec(num_experts=values["num_experts"], top_k=values["num_experts_per_tok"],
                   intermediate_size=values["moe_intermediate_size"], layers=layers,
                   renormalize=bool(values["norm_topk_prob"]),
                   shared_size=values.get("shared_expert_intermediate_size") or 0, shared_name="shared_expert",
                   shared_gate=bool(values.get("shared_expert_intermediate_size")))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, rms_norm
    from .decoder.moe import mixed_mlp
    from .decoder.self_attention import SelfAttention

    own: QwenSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.o_bias,
                        head_norm_eps=own.rms_norm_eps if own.qk_norm else None)
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention,
                  mixed_mlp(parallel.experts, dense_mlp(bias=own.mlp_bias)))


def reward_blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    """Returns the blocks of Qwen2.5-Math-RM or PRM, whose scores are those of two layers."""
    from ..layers.classifier_head import TwoLayerHead

    return replace(blocks(spec, parallel), classifier=partial(TwoLayerHead, "score"))


def tensor_parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
    """Splits experts that transformers stacked."""
    from ..weights.expert_names import by_expert

    return by_expert(name, tensor)


def from_last_on(layer: int, max_window_layers: int) -> bool:
    return layer >= max_window_layers


def _every_second_before_last(layer: int, max_window_layers: int) -> bool:
    return layer < max_window_layers and layer % 2 == 0


def _every(layer: int, max_window_layers: int) -> bool:
    return True


DENSE = {
    **COMMON, "num_key_value_heads": 32, "intermediate_size": 22016, "vocab_size": 151936,
    "max_position_embeddings": 32768, "sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_MOE = {
    **DENSE, "hidden_size": 2048, "num_hidden_layers": 24, "num_experts_per_tok": 4, "decoder_sparse_step": 1,
    "norm_topk_prob": False}
_DENSE_3 = {**DENSE, "head_dim": 128, "attention_bias": False}
_MOE_2 = {**_MOE, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 5632, "qkv_bias": True,
          "num_experts": 60, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
_MOE_3 = {**_MOE, "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 6144,
          "attention_bias": False, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}

MODELS.register("Qwen2ForCausalLM", "Qwen2ForSequenceClassification", "Qwen2Model")(
    ModelFamily(partial(read_qwen2, slides=from_last_on, has_experts=False), blocks, DENSE,
                tensor_parts, title="Qwen2", notes="biases of q, k and v"))
MODELS.register("Qwen2ForRewardModel")(
    ModelFamily(partial(read_qwen2, slides=from_last_on, has_experts=False), reward_blocks,
                {**DENSE, "num_labels": 1}, tensor_parts, title="Qwen2.5-Math-RM",
                notes="Qwen2 with a score of two layers"))
MODELS.register("Qwen2ForProcessRewardModel")(
    ModelFamily(partial(read_qwen2, slides=from_last_on, has_experts=False), reward_blocks,
                {**DENSE, "num_labels": 2}, tensor_parts, title="Qwen2.5-Math-PRM",
                notes="scores of a step's end, of two layers"))
MODELS.register("Qwen3ForCausalLM", "Qwen3ForSequenceClassification", "Qwen3Model")(
    ModelFamily(partial(read_qwen3, slides=from_last_on, has_experts=False), blocks, _DENSE_3,
                tensor_parts, title="Qwen3", notes="normed heads of q and k"))
MODELS.register("Qwen2MoeForCausalLM", "Qwen2MoeForSequenceClassification", "Qwen2MoeModel")(
    ModelFamily(partial(read_qwen2, slides=_every_second_before_last, has_experts=True), blocks, _MOE_2,
                tensor_parts, title="Qwen2-MoE", notes="mixtures of experts, with a shared one"))
MODELS.register("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification", "Qwen3MoeModel")(
    ModelFamily(partial(read_qwen3, slides=_every, has_experts=True), blocks, _MOE_3,
                tensor_parts, title="Qwen3-MoE", notes="mixtures of experts"))
