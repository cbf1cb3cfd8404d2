"""Falcon-H1: attention and Mamba-2 side by side in each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..api.errors import ConfigError
from ..config.defaults import COMMON
from ..config.mamba2 import Mamba2Spec, check_mamba2, heads_of_group
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.rope import RotarySpec, read_rope
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..distributed.tp import TPGroup
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from ..weights.slots import Allocate
    from .decoder.blocks import Blocks, LayerAttention


@dataclass(frozen=True)
class FalconH1Spec:
    """Falcon-H1's own facts. ``factors``: what checkpoints' matrices are multiplied by, by the ends of their names; the
    five of ``in_proj`` are those of gates, x, B, C and time steps."""

    rope: RotarySpec
    rms_norm_eps: float
    mamba: Mamba2Spec
    embedding_multiplier: float
    lm_head_multiplier: float
    factors: Mapping[str, tuple[float, ...]]


def read(config: ModelConfig) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    check_mamba2(values, "projectors_bias", "mamba_proj_bias", "attention_bias", "mlp_bias")
    inner = values["mamba_d_ssm"] or int(values["mamba_expand"] * values["hidden_size"])
    heads, groups = values["mamba_n_heads"], values["mamba_n_groups"]
    order: Literal["norm_first", "gate_first"] = "norm_first" if values["mamba_norm_before_gate"] else "gate_first"
    mamba = Mamba2Spec(groups, heads_of_group(inner, heads, groups), inner // heads, values["mamba_d_state"],
                       values["mamba_d_conv"], order if values["mamba_rms_norm"] else "none",
                       bool(values["mamba_conv_bias"]))
    own = FalconH1Spec(rope, values["rms_norm_eps"], mamba, values["embedding_multiplier"],
                       values["lm_head_multiplier"], _factors(values))
    layers = tuple(range(values["num_hidden_layers"]))
    spec = config.spec(rope.longest_context, own, state=mamba.state(layers, layers))
    if spec.quantization is not None:
        raise ConfigError("Falcon-H1's matrices are multiplied by factors while they are loaded, and not quantized: "
                          "use an unquantized checkpoint without --quantization.")
    return spec


def _factors(values: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    gate, down = values["mlp_multipliers"] or (1.0, 1.0)
    attends, mixes = values["attention_in_multiplier"], values["ssm_in_multiplier"]
    return {"self_attn.q_proj.weight": (attends,), "self_attn.v_proj.weight": (attends,),
            "self_attn.k_proj.weight": (attends * values["key_multiplier"],),
            "self_attn.o_proj.weight": (values["attention_out_multiplier"],),
            "mamba.in_proj.weight": tuple(mixes * each for each in values["ssm_multipliers"] or (1.0,) * 5),
            "mamba.out_proj.weight": (values["ssm_out_multiplier"],),
            "feed_forward.gate_proj.weight": (gate,), "feed_forward.down_proj.weight": (down,)}


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, HeadForm, LayerForm, dense_mlp, rms_norm
    from .decoder.embedding_steps import scaled
    from .decoder.mamba2 import Mamba2Mixer, ParallelMixers
    from .decoder.self_attention import SelfAttention

    own: FalconH1Spec = spec.family

    def mixers(name: str, layer: int, spec: ModelSpec, tp: TPGroup, allocate: Allocate, *,
               in_features: int | None = None) -> LayerAttention:
        mamba = Mamba2Mixer(f"{name.removesuffix('self_attn')}mamba", layer, spec, tp, allocate,
                            own.mamba, eps=own.rms_norm_eps)
        return ParallelMixers(SelfAttention(name, layer, spec, tp, allocate), mamba, tp)

    return Blocks(own.rope, rms_norm(own.rms_norm_eps), mixers, dense_mlp(),
                  form=LayerForm(mlp_norm="pre_ff_layernorm"), head=HeadForm(multiplier=own.lm_head_multiplier),
                  embedding=(scaled(own.embedding_multiplier),))


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """Multiplies matrices by their factors, splits the mixers' input projections, and renames."""
    from ..weights.fused_tensors import Scaled, split_rows

    own: FalconH1Spec = spec.family

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        factors = next((found for end, found in own.factors.items() if name.endswith(end)), (1.0,))
        renamed = name.replace(".feed_forward.", ".mlp.").replace("model.final_layernorm.", "model.norm.")
        if not name.endswith("mamba.in_proj.weight"):
            yield renamed, tensor if factors == (1.0,) else Scaled(tensor, factors[0])
            return
        for part, rows, factor in zip(("z", "x", "b", "c", "dt"), split_rows(tensor, own.mamba.in_sizes), factors):
            yield renamed.replace(".in_proj.", f".in_proj_{part}."), Scaled(rows, factor)

    return parts


_DEFAULTS = {**COMMON, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128000, "rms_norm_eps": 1e-5,
             "max_position_embeddings": 8192, "eos_token_id": 2, "mamba_d_ssm": 1024, "mamba_n_heads": 128,
             "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True,
             "mamba_norm_before_gate": True, "mamba_rms_norm": False, "time_step_limit": (0.0, float("inf")),
             "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0, "mlp_multipliers": None, "key_multiplier": 1.0,
             "attention_out_multiplier": 1.0, "attention_in_multiplier": 1.0, "ssm_multipliers": None,
             "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0}

MODELS.register("FalconH1ForCausalLM")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="Falcon-H1",
                notes="attention and Mamba-2 side by side in each layer"))
