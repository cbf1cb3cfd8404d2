"""Hunyuan, dense and with mixtures of experts: norms of queries' and keys' heads after rope."""

from __future__ import annotations

import dataclasses
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
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class HunyuanSpec:
    """Hunyuan's own facts. ``attention_bias`` is that of q, k, v and the output."""

    rope: RotarySpec
    rms_norm_eps: float
    attention_bias: bool


def read(config: ModelConfig) -> ModelSpec:
    return _read(config, None)


def read_moe(config: ModelConfig) -> ModelSpec:
    return _read(config, _read_experts(config.values))


def _read(config: ModelConfig, moe: MoESpec | None) -> ModelSpec:
    check_silu(config)
    values = config.values
    if values.get("use_cla"):
        raise ConfigError("config.json states use_cla: layers that share keys and values are not supported.")
    rope = _read_rope(values, config.head_dim)
    own = HunyuanSpec(rope, values["rms_norm_eps"], bool(values["attention_bias"]))
    return config.spec(rope.longest_context, own, windows=no_window(values), moe=moe)


def _read_rope(values: Mapping[str, Any], head_dim: int) -> RotarySpec:
    """Reads the rotary embeddings. A "dynamic" scaling that states ``alpha`` is a larger base, whatever the length."""
    scaling = values.get("rope_scaling") or values.get("rope_parameters") or {}
    alpha = scaling.get("alpha")
    if not alpha or (scaling.get("rope_type") or scaling.get("type")) != "dynamic":
        return read_rope(values)
    plain = read_rope({**values, "rope_scaling": None,
                       "rope_parameters": {"rope_theta": scaling.get("rope_theta") or values.get("rope_theta")}})
    return dataclasses.replace(plain, rope_theta=plain.rope_theta * alpha ** (head_dim / (head_dim - 2)))


def _read_experts(values: Mapping[str, Any]) -> MoESpec | None:
    """Reads the experts, of which every layer has as many; None where it has one."""
    count, top_k, shared = (_of_all_layers(values, name) for name in ("num_experts", "moe_topk", "num_shared_expert"))
    if count < 2:
        return None
    size = _of_all_layers(values, "moe_intermediate_size") or values["intermediate_size"]
    return MoESpec(num_experts=count, top_k=top_k, intermediate_size=size,
                   layers=tuple(range(values["num_hidden_layers"])), shared_size=shared * values["intermediate_size"],
                   shared_name="shared_mlp")


def _of_all_layers(values: Mapping[str, Any], name: str) -> int:
    """Returns a number that may be stated for each layer; raises ConfigError where layers differ in it."""
    stated = values[name]
    each = stated if isinstance(stated, list) else [stated]
    if any(number != each[0] for number in each):
        raise ConfigError(f"config.json states {name} {each}: layers that differ in it are not supported.")
    return each[0] or 0


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, rms_norm
    from .decoder.moe import mixed_mlp
    from .decoder.position_steps import rotate_before_norms
    from .decoder.self_attention import SelfAttention

    own: HunyuanSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias,
                        head_norm_eps=own.rms_norm_eps, position_step=rotate_before_norms)
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention, mixed_mlp(parallel.experts))


_NAMES = {".query_layernorm.": ".q_norm.", ".key_layernorm.": ".k_norm.", ".mlp.gate.wg.": ".mlp.gate."}


def tensor_parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
    """Gives norms and routers the names that other families' have, and splits experts that transformers stacked."""
    from ..weights.expert_names import by_expert

    for given, own in _NAMES.items():
        name = name.replace(given, own)
    return by_expert(name, tensor)


_DENSE = {**COMMON, "vocab_size": 290943, "intermediate_size": 11008, "max_position_embeddings": 2048,
          "rms_norm_eps": 1e-5, "attention_bias": False, "eos_token_id": 2}
_MOE = {**_DENSE, "num_experts": 1, "moe_topk": 1, "num_shared_expert": 1, "moe_intermediate_size": None}

_NOTES = "dense, and mixtures of experts with one size in all layers; norms after rope"

MODELS.register("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1ForSequenceClassification", "HunYuanDenseV1Model")(
    ModelFamily(read, blocks, _DENSE, tensor_parts, title="Hunyuan V1", notes=_NOTES))
MODELS.register("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1ForSequenceClassification", "HunYuanMoEV1Model")(
    ModelFamily(read_moe, blocks, _MOE, tensor_parts, title="Hunyuan V1", notes=_NOTES))
