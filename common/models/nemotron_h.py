"""Nemotron-H: layers of one mixer each (Mamba-2, attention without rotary embeddings, or a plain MLP of squared ReLUs).

A mixer of tokens and the MLP that follows it are one layer here; some lack one of the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..config.defaults import COMMON
from ..config.mamba2 import Mamba2Spec, check_mamba2, heads_of_group
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..distributed.tp import TPGroup
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from ..weights.slots import Allocate
    from .decoder.blocks import Blocks, LayerAttention, LayerForm, LayerMLP

_KINDS = {"M": "mamba", "*": "self_attn", "-": "mlp"}
_NAMED = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}


@dataclass(frozen=True)
class NemotronHSpec:
    """Nemotron-H's own facts. ``places``: of each of the checkpoint's layers its kind and the layer here that it is
    part of."""

    rope: RotarySpec
    norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    mamba: Mamba2Spec
    places: tuple[tuple[str, int], ...]

    def layers_of(self, kind: str) -> tuple[int, ...]:
        return tuple(layer for each, layer in self.places if each == kind)


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    check_mamba2(values, "mamba_proj_bias", "use_bias")
    inner = values["mamba_num_heads"] * values["mamba_head_dim"]
    mamba = Mamba2Spec(values["n_groups"], heads_of_group(inner, values["mamba_num_heads"], values["n_groups"]),
                       values["mamba_head_dim"], values["ssm_state_size"], values["conv_kernel"], "gate_first",
                       bool(values["use_conv_bias"]), values["time_step_min"])
    places = _places(_pattern(values))
    own = NemotronHSpec(rope, values["layer_norm_epsilon"], values["mlp_hidden_act"], bool(values["attention_bias"]),
                        bool(values["mlp_bias"]), mamba, places)
    config = ModelConfig(config.architecture, {**values, "num_hidden_layers": places[-1][1] + 1},
                         config.eos_token_ids, config.args)
    return config.spec(rope.longest_context, own,
                       state=mamba.state(own.layers_of("mamba"), own.layers_of("self_attn")))


def _pattern(values: Mapping[str, Any]) -> str:
    """Reads the kinds of layers, a letter each; raises ConfigError for mixtures of experts, and without the others."""
    named = values.get("layers_block_type") or values.get("layer_types")
    pattern = "".join(_NAMED.get(kind, "?") for kind in named) if named else str(values["hybrid_override_pattern"])
    if "E" in pattern:
        raise ConfigError("config.json states layers of experts without gates (moe): Nemotron-H's dense models are "
                          "supported.")
    if set(pattern) != set(_KINDS):
        raise ConfigError(f"config.json states the layers {pattern}: they must be M (Mamba-2), * (attention) and - "
                          "(MLP), each of them once at least.")
    return pattern


def _places(pattern: str) -> tuple[tuple[str, int], ...]:
    """Puts an MLP into the layer of the mixer before it."""
    places: list[tuple[str, int]] = []
    for index, letter in enumerate(pattern):
        joins = letter == "-" and index and pattern[index - 1] != "-"
        places.append((_KINDS[letter], places[-1][1] if joins else places[-1][1] + 1 if places else 0))
    return tuple(places)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.absent import NoAttention, NoMLP
    from .decoder.blocks import PRE_NORM, Blocks, LayerForm, dense_mlp, rms_norm
    from .decoder.mamba2 import Mamba2Mixer
    from .decoder.self_attention import SelfAttention

    own: NemotronHSpec = spec.family
    attends, mixes, has_mlp = (set(own.layers_of(kind)) for kind in ("self_attn", "mamba", "mlp"))
    dense = dense_mlp(bias=own.mlp_bias, activation=own.hidden_act, gated=False)

    def attention(name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate, *,
                  in_features: int | None = None) -> LayerAttention:
        if layer in attends:
            return SelfAttention(name, layer, spec, tp, allocate, qkv_bias=own.attention_bias,
                                 o_bias=own.attention_bias)
        if layer in mixes:
            return Mamba2Mixer(name.replace("self_attn", "mamba"), layer, spec, tp, allocate, own.mamba,
                               eps=own.norm_eps)
        return NoAttention(spec.hidden_size)

    def mlp(name: str, index: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate) -> LayerMLP:
        return dense(name, index, spec, tp, allocate) if index in has_mlp else NoMLP()

    def form_of(layer: int) -> LayerForm:
        return LayerForm(PRE_NORM.input_norm if layer in attends | mixes else None,
                         PRE_NORM.mlp_norm if layer in has_mlp else None)

    return Blocks(own.rope, rms_norm(own.norm_eps), attention, mlp, form_of=form_of, rope_of=lambda layer: None)


_NORMS = {"mlp": "post_attention_layernorm"}
_LAYER = re.compile(r"(?:backbone|model)\.layers\.(\d+)\.(.*)")
_OTHERS = {"backbone.embeddings.": "model.embed_tokens.", "model.embeddings.": "model.embed_tokens.",
           "backbone.norm_f.": "model.norm.", "model.norm_f.": "model.norm."}


def tensor_parts(name: str, tensor: LazyTensor, *, own: NemotronHSpec) -> Iterable[tuple[str, LazyTensor]]:
    """Names the parts of layers, and splits the mixers' input projections."""
    from ..weights.fused_tensors import split_rows

    if (found := _LAYER.fullmatch(name)) is None:
        for given, renamed in _OTHERS.items():
            name = name.replace(given, renamed)
        yield name, tensor
        return
    kind, layer = own.places[int(found[1])]
    part = found[2].removeprefix("mixer.")
    if found[2].startswith("norm."):
        yield f"model.layers.{layer}.{_NORMS.get(kind, 'input_layernorm')}.{found[2].removeprefix('norm.')}", tensor
    elif part == "in_proj.weight":
        for letter, rows in zip(("z", "x", "b", "c", "dt"), split_rows(tensor, own.mamba.in_sizes)):
            yield f"model.layers.{layer}.mamba.in_proj_{letter}.weight", rows
    else:
        yield f"model.layers.{layer}.{kind}.{part}", tensor


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    return partial(tensor_parts, own=spec.family)


_DEFAULTS = {
    **COMMON, "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096, "mlp_hidden_act": "relu2",
    "attention_bias": False, "mlp_bias": False, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
    "n_groups": 8, "conv_kernel": 4, "time_step_min": 0.001, "time_step_limit": (0.0, float("inf")),
    "use_conv_bias": True, "layer_norm_epsilon": 1e-5, "eos_token_id": 2, "hybrid_override_pattern": "M-*-"}

MODELS.register("NemotronHForCausalLM")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="Nemotron-H, Nemotron Nano 2",
                notes="Mamba-2, attention in a few layers; dense models"))
