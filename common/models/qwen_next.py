"""Qwen3-Next and Qwen3.5: gated delta networks, and gated attention in every fourth layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.rope import RotarySpec, read_rope
from ..config.state import StateSpec
from .qwen import read_experts
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ...kernels.arguments import DeltaNet
    from ..distributed.parallel import Parallel
    from ..distributed.tp import TPGroup
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from ..weights.slots import Allocate
    from .decoder.blocks import Blocks, LayerAttention


@dataclass(frozen=True)
class QwenNextSpec:
    """The family's own facts. ``linear_*`` are those of the gated delta networks; ``separate``: their projections of
    queries, keys and values, of gates, betas and decays are four in checkpoints."""

    rope: RotarySpec
    rms_norm_eps: float
    attention_bias: bool
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    separate: bool

    def __post_init__(self) -> None:
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise ConfigError(f"config.json gives {self.linear_num_value_heads} value heads to "
                              f"{self.linear_num_key_heads} key heads, which does not come out even.")

    @property
    def head_values(self) -> int:
        """Values of a key head's state: the convolution's inputs, and a matrix for each of its value heads."""
        group = self.linear_num_value_heads // self.linear_num_key_heads
        keys, values = self.linear_key_head_dim, group * self.linear_value_head_dim
        return (2 * keys + values) * (self.linear_conv_kernel_dim - 1) + keys * values


def read(config: ModelConfig, *, separate: bool, has_experts: bool) -> ModelSpec:
    check_silu(config)
    values = config.values
    rope = read_rope(_without_sections(values), may_be_partial=True)
    own = QwenNextSpec(
        rope, values["rms_norm_eps"], bool(values["attention_bias"]), values["linear_num_key_heads"],
        values["linear_num_value_heads"], values["linear_key_head_dim"], values["linear_value_head_dim"],
        values["linear_conv_kernel_dim"], separate)
    kinds = _layer_types(values)
    state = StateSpec(layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
                      attention_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention"),
                      num_heads=own.linear_num_key_heads, head_values=own.head_values, head_name="key heads")
    return config.spec(rope.longest_context, own, moe=read_experts(values) if has_experts else None, state=state)


def _layer_types(values: Mapping[str, Any]) -> list[str]:
    """Reads the kind of each layer; raises ConfigError for others than two, and without one of each."""
    count, every = values["num_hidden_layers"], values["full_attention_interval"]
    kinds = values.get("layer_types") or ["full_attention" if (layer + 1) % every == 0 else "linear_attention"
                                          for layer in range(count)]
    if len(kinds) != count or set(kinds) != {"linear_attention", "full_attention"}:
        raise ConfigError(f"config.json's layer_types must name linear_attention or full_attention for each of {count} "
                          f"layers, and each of them once; it has {len(kinds)}: {', '.join(sorted(set(kinds)))}.")
    return list(kinds)


def _without_sections(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values without the sections of positions by time, height and width, which are equal for text."""
    rope = {name: value for name, value in (values.get("rope_parameters") or {}).items()
            if not name.startswith("mrope_")}
    return {**values, "rope_parameters": rope}


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, rms_norm
    from .decoder.gated_delta_net import GatedDeltaNet
    from .decoder.moe import mixed_mlp
    from .decoder.self_attention import SelfAttention

    own: QwenNextSpec = spec.family
    state = spec.state
    assert state is not None
    attend = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias,
                     head_norm_eps=own.rms_norm_eps, head_norm_offset=1.0, gated=True)
    mix = partial(GatedDeltaNet, shape=_shape(own), eps=own.rms_norm_eps, separate=own.separate)

    def attention(name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate, *,
                  in_features: int | None = None) -> LayerAttention:
        make = attend if spec.state is None or layer in state.attention_layers else mix
        return make(name, layer, spec, tp, allocate, in_features=in_features)

    return Blocks(own.rope, rms_norm(own.rms_norm_eps, offset=1.0), attention,
                  mixed_mlp(parallel.experts, dense_mlp()),
                  rope_of=lambda layer: own.rope if layer in state.attention_layers else None)


def _shape(own: QwenNextSpec) -> DeltaNet:
    from ...kernels.arguments import DeltaNet

    return DeltaNet(own.linear_num_key_heads, own.linear_num_value_heads // own.linear_num_key_heads,
                    own.linear_key_head_dim, own.linear_value_head_dim, own.linear_conv_kernel_dim)


_DRAFT_NAMES = {"mtp.layers.0.": "", "mtp.fc.": "eh_proj.", "mtp.norm.": "shared_head.norm.",
                "mtp.pre_fc_norm_embedding.": "enorm.", "mtp.pre_fc_norm_hidden.": "hnorm."}


def tensor_parts(name: str, tensor: LazyTensor, *, own: QwenNextSpec,
                 num_layers: int) -> Iterable[tuple[str, LazyTensor]]:
    """Splits experts that transformers stacked, and the fused projection of queries, keys and values; names the layer
    of multi-token prediction as DeepSeek-V3's."""
    from ..weights.expert_names import by_expert
    from ..weights.fused_tensors import split_rows

    for given, draft in _DRAFT_NAMES.items():
        if name.startswith(given):
            name = f"model.layers.{num_layers}.{draft}{name.removeprefix(given)}"
    if ".in_proj_qkv." in name:
        keys = own.linear_num_key_heads * own.linear_key_head_dim
        values = own.linear_num_value_heads * own.linear_value_head_dim
        for part, rows in zip("qkv", split_rows(tensor, (keys, keys, values))):
            yield name.replace(".in_proj_qkv.", f".in_proj_{part}."), rows
    else:
        yield from by_expert(name, tensor)


_LINEAR = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
           "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
           "attention_bias": False, "partial_rotary_factor": 0.25, "num_key_value_heads": 2, "head_dim": 256,
           "max_position_embeddings": 32768}
_NEXT = {**COMMON, **_LINEAR, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
         "intermediate_size": 5632, "vocab_size": 151936, "num_experts": 512, "num_experts_per_tok": 10,
         "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True,
         "decoder_sparse_step": 1, "num_nextn_predict_layers": 1}
_3_5 = {**COMMON, **_LINEAR, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 12288, "vocab_size": 248320}
_3_5_MOE = {**_3_5, "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "intermediate_size": 0,
            "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1}


def _parts_of(spec: ModelSpec) -> TensorParts:
    return partial(tensor_parts, own=spec.family, num_layers=spec.num_layers)


MODELS.register("Qwen3NextForCausalLM")(
    ModelFamily(partial(read, separate=False, has_experts=True), blocks, _NEXT, tensor_parts_of=_parts_of,
                title="Qwen3-Next", notes="gated delta networks, gated attention in every fourth layer"))
MODELS.register("Qwen3_5ForCausalLM")(
    ModelFamily(partial(read, separate=True, has_experts=False), blocks, _3_5, tensor_parts_of=_parts_of,
                title="Qwen3.5", notes="text; gated delta networks, gated attention in every fourth layer"))
MODELS.register("Qwen3_5MoeForCausalLM")(
    ModelFamily(partial(read, separate=True, has_experts=True), blocks, _3_5_MOE, tensor_parts_of=_parts_of,
                title="Qwen3.5-MoE", notes="text; as Qwen3.5, with mixtures of experts"))
