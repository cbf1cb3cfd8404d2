"""Ernie 4.5, dense and with mixtures of experts: Llama whose rotary embeddings turn neighbouring values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.moe import MoESpec
from ..config.rope import RotarySpec, read_rope
from ..config.window import no_window
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class ErnieSpec:
    """Ernie's own facts. ``use_bias``: all projections have a bias."""

    rope: RotarySpec
    rms_norm_eps: float
    use_bias: bool


def read(config: ModelConfig) -> ModelSpec:
    return _read(config, None)


def read_moe(config: ModelConfig) -> ModelSpec:
    if config.values["use_bias"]:
        raise ConfigError("config.json states use_bias: Ernie's mixtures of experts are supported without biases.")
    return _read(config, _read_experts(config.values))


def _read(config: ModelConfig, moe: MoESpec | None) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    own = ErnieSpec(rope, values["rms_norm_eps"], bool(values["use_bias"]))
    return config.spec(rope.longest_context, own, windows=no_window(values), moe=moe)


def _read_experts(values: Mapping[str, Any]) -> MoESpec | None:
    """Reads the experts; None where no layer has any. Smaller models state first and last layer as one number each."""
    count = values["num_hidden_layers"]
    first, last, every = (_number(values, f"moe_layer_{name}") for name in ("start_index", "end_index", "interval"))
    last = count - 1 if last == -1 else last
    layers = tuple(i for i in range(first, min(last, count - 1) + 1) if (i + 1) % every == 0)
    if not layers or not values["moe_num_experts"]:
        return None
    size = _number(values, "moe_intermediate_size")
    return MoESpec(num_experts=_number(values, "moe_num_experts"), top_k=values["moe_k"], intermediate_size=size,
                   layers=layers, correction_bias=True, shared_size=(values["moe_num_shared_experts"] or 0) * size)


def _number(values: Mapping[str, Any], name: str) -> int:
    """Returns a number; raises ConfigError where texts and images have different ones."""
    if isinstance(values[name], list):
        raise ConfigError(f"config.json states {name} {values[name]}: models with experts for images are not "
                          "supported.")
    return int(values[name])


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, rms_norm
    from .decoder.moe import mixed_mlp
    from .decoder.self_attention import SelfAttention

    own: ErnieSpec = spec.family
    return Blocks(own.rope, rms_norm(own.rms_norm_eps),
                  partial(SelfAttention, qkv_bias=own.use_bias, o_bias=own.use_bias),
                  mixed_mlp(parallel.experts, dense_mlp(bias=own.use_bias)))


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """Reorders queries and keys for kernels, names the router's bias as others', and splits stacked experts."""
    from ..weights.expert_names import by_expert
    from ..weights.interleaved_rotary import halves_of

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        name = name.replace(".gate.moe_statics.", ".moe_statics.").replace(".mlp.moe_statics.", ".mlp.gate.")
        return by_expert(name, tensor)

    return halves_of(spec, spec.head_dim, parts)


_DENSE = {
    **COMMON, "vocab_size": 103424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "use_bias": False, "eos_token_id": 2}
_MOE = {
    **_DENSE, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
    "num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
    "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}

_NOTES = "dense, and mixtures of experts for texts"

MODELS.register("Ernie4_5ForCausalLM", "Ernie4_5Model")(
    ModelFamily(read, blocks, _DENSE, tensor_parts_of=tensor_parts_of, title="Ernie 4.5", notes=_NOTES))
MODELS.register("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeModel")(
    ModelFamily(read_moe, blocks, _MOE, tensor_parts_of=tensor_parts_of, title="Ernie 4.5", notes=_NOTES))
