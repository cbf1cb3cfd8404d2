"""DBRX: LayerNorms without biases, clipped queries, keys and values, and a mixture of experts in every layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.moe import MoESpec
from ..config.rope import RotarySpec, read_rope
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class DbrxSpec:
    """DBRX's own facts. Queries, keys and values are kept within ``clip_qkv`` of zero, where it is not None."""

    rope: RotarySpec
    clip_qkv: float | None


def read(config: ModelConfig) -> ModelSpec:
    config = dataclasses.replace(config, values=_common_names(config.values))
    values, experts = config.values, config.values["ffn_config"]
    if (name := (experts.get("ffn_act_fn") or {}).get("name", "silu")) != "silu":
        raise ConfigError(f"Activation {name!r} of experts is not supported: use a checkpoint with 'silu'.")
    if (power := experts.get("moe_normalize_expert_weights", 1)) not in (None, 1):
        raise ConfigError(f"config.json states moe_normalize_expert_weights {power}: it must be 1 or null.")
    moe = MoESpec(num_experts=experts.get("moe_num_experts", 4), top_k=experts.get("moe_top_k", 1),
                  intermediate_size=values["intermediate_size"], layers=tuple(range(values["num_hidden_layers"])),
                  renormalize=power == 1)
    rope = read_rope(values)
    return config.spec(rope.longest_context, DbrxSpec(rope, values["attn_config"].get("clip_qkv")), moe=moe)


def _common_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with what others name otherwise under their names, too."""
    attention, experts = values["attn_config"] or {}, values["ffn_config"] or {}
    return {**values, "attn_config": attention, "ffn_config": experts, "hidden_size": values["d_model"],
            "num_attention_heads": values["n_heads"], "num_hidden_layers": values["n_layers"],
            "max_position_embeddings": values["max_seq_len"], "num_key_value_heads": attention.get("kv_n_heads", 1),
            "rope_theta": attention.get("rope_theta") or 10000.0,
            "intermediate_size": experts.get("ffn_hidden_size", 3584)}


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, layer_norm
    from .decoder.moe import mixed_mlp
    from .decoder.qkv_steps import clip
    from .decoder.self_attention import SelfAttention

    own: DbrxSpec = spec.family
    return Blocks(own.rope, layer_norm(1e-5, bias=False), partial(SelfAttention, qkv_step=clip(own.clip_qkv)),
                  mixed_mlp(parallel.experts))


_NAMES = {
    "transformer.blocks.": "model.layers.", "transformer.wte.": "model.embed_tokens.",
    "transformer.norm_f.": "model.norm.", ".norm_attn_norm.norm_1.": ".input_layernorm.",
    ".norm_attn_norm.norm_2.": ".post_attention_layernorm.", ".norm_attn_norm.attn.": ".self_attn.",
    ".out_proj.": ".o_proj.", ".ffn.router.layer.": ".mlp.gate.", ".ffn.experts.mlp.": ".mlp.experts."}
_PROJECTIONS = {"w1": "gate_proj", "v1": "up_proj", "w2": "down_proj"}


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """Gives tensors the names that other families' have, and splits queries from keys and values, and experts."""
    from ..weights.fused_tensors import Transposed, qkv_rows, split_names, split_rows

    assert spec.moe is not None
    experts = [spec.moe.intermediate_size] * spec.moe.num_experts
    split = split_names({"Wqkv": qkv_rows(spec)}, _NAMES)

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        for own_name, part in split(name, tensor):
            layer, found, matrix = own_name.rpartition(".mlp.experts.")
            if not found:
                yield own_name, part
                continue
            for expert, rows in enumerate(split_rows(part, experts)):
                own = Transposed(rows) if matrix == "w2" else rows
                yield f"{layer}.mlp.experts.{expert}.{_PROJECTIONS[matrix]}.weight", own

    return parts


_DEFAULTS = {"d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048, "vocab_size": 32000,
             "attn_config": None, "ffn_config": None, "tie_word_embeddings": False}

MODELS.register("DbrxForCausalLM", "DbrxModel")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="DBRX",
                notes="mixtures of experts; clipped queries, keys and values"))
