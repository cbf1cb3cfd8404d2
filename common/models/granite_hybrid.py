"""Granite 4: Granite 3's layers, most with Mamba-2 in place of attention; dense or mixtures of experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..config.mamba2 import Mamba2Spec, check_mamba2, heads_of_group
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from . import granite, granite_moe
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..distributed.tp import TPGroup
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from ..weights.slots import Allocate
    from .decoder.blocks import Blocks, LayerAttention

_KINDS = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}


@dataclass(frozen=True)
class GraniteHybridSpec:
    """Granite 4's own facts, besides Granite's. ``rotates``: attention has rotary embeddings."""

    granite: granite.GraniteSpec
    mamba: Mamba2Spec
    rotates: bool


def read(config: ModelConfig) -> ModelSpec:
    values = config.values
    check_mamba2(values, "mamba_proj_bias")
    heads, groups = values["mamba_n_heads"], values["mamba_n_groups"]
    if groups != 1:
        raise ConfigError(f"config.json states mamba_n_groups {groups}: only 1 is supported, as all heads are normed "
                          "together.")
    inner = int(values["mamba_expand"] * values["hidden_size"])
    mamba = Mamba2Spec(groups, heads_of_group(inner, heads, groups), inner // heads, values["mamba_d_state"],
                       values["mamba_d_conv"], "gate_first", bool(values["mamba_conv_bias"]))
    if not values["num_experts"]:
        config = dataclasses.replace(config, values={**values, "intermediate_size": values["shared_intermediate_size"]})
    spec = granite_moe.read(config) if values["num_experts"] else granite.read(config)
    mixes = _mixes(values)
    state = mamba.state(tuple(layer for layer, is_mixer in enumerate(mixes) if is_mixer),
                        tuple(layer for layer, is_mixer in enumerate(mixes) if not is_mixer))
    own = GraniteHybridSpec(spec.family, mamba, values["position_embedding_type"] == "rope")
    return dataclasses.replace(spec, family=own, state=state)


def _mixes(values: Mapping[str, Any]) -> list[bool]:
    """Reads which layers have Mamba-2; raises ConfigError for other kinds of layers, and without one of each."""
    kinds = values.get("layer_types") or values.get("layers_block_type") or ()
    if len(kinds) != values["num_hidden_layers"] or {_KINDS.get(kind) for kind in kinds} != {True, False}:
        raise ConfigError(f"config.json's layer_types must name mamba or attention for each of "
                          f"{values['num_hidden_layers']} layers, and each of them once; it has {len(kinds)}: "
                          f"{', '.join(sorted(set(kinds)))}.")
    return [_KINDS[kind] for kind in kinds]


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.mamba2 import Mamba2Mixer

    own: GraniteHybridSpec = spec.family
    state, plain = spec.state, dataclasses.replace(spec, family=own.granite)
    assert state is not None
    made = granite.blocks(plain, parallel) if spec.moe is None else granite_moe.blocks(plain, parallel)

    def attention(name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate, *,
                  in_features: int | None = None) -> LayerAttention:
        if layer in state.attention_layers:
            return made.attention(name, layer, spec, tp, allocate, in_features=in_features)
        return Mamba2Mixer(name.replace("self_attn", "mamba"), layer, spec, tp, allocate, own.mamba,
                           eps=own.granite.rms_norm_eps)

    rotates = set(state.attention_layers) if own.rotates else set()
    return dataclasses.replace(made, attention=attention,
                               rope_of=lambda layer: own.granite.rope if layer in rotates else None)


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """As Granite 3's, and splits the mixers' input projections."""
    from ..weights.fused_tensors import split_names, split_rows

    own: GraniteHybridSpec = spec.family
    if spec.moe is None:
        gates = dict.fromkeys(("gate_proj", "up_proj"), spec.intermediate_size)
        split = split_names({"input_linear": gates}, {".shared_mlp.": ".mlp.", ".output_linear.": ".down_proj."})
    else:
        split = granite_moe.tensor_parts_of(spec)

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        if not name.endswith("mamba.in_proj.weight"):
            yield from split(name, tensor)
            return
        for letter, rows in zip(("z", "x", "b", "c", "dt"), split_rows(tensor, own.mamba.in_sizes)):
            yield name.replace(".in_proj.", f".in_proj_{letter}."), rows

    return parts


_DEFAULTS = {
    **granite_moe.DEFAULTS, "shared_intermediate_size": 1024, "mamba_n_heads": 128, "mamba_n_groups": 1,
    "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
    "time_step_limit": (0.0, float("inf")), "position_embedding_type": None,
    "layer_types": ("mamba",) * 31 + ("attention",)}

MODELS.register("GraniteMoeHybridForCausalLM")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="Granite 4",
                notes="Mamba-2, attention in a few layers; dense, and mixtures of experts"))
