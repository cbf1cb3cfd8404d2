"""DeepSeek-V2 and V3: multi-head latent attention (MLA) and, except in the first layers, mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from ..config.defaults import COMMON
from ..config.mla import MLASpec
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

Version = Literal[2, 3]


@dataclass(frozen=True)
class DeepseekSpec:
    """DeepSeek's own facts. ``attention_bias`` is that of the projections to latents."""

    rope: RotarySpec
    rms_norm_eps: float
    attention_bias: bool
    o_bias: bool
    mlp_bias: bool


def read(config: ModelConfig, *, version: Version) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    bias, mla = bool(values["attention_bias"]), read_latents(values, rope.rope_scaling)
    own = DeepseekSpec(rope, values["rms_norm_eps"], bias, bias, bool(values.get("mlp_bias", False)))
    return config.spec(rope.longest_context, own, num_kv_heads=1, head_dim=mla.qk_dim, mla=mla,
                       windows=no_window(values), moe=read_experts(values, version=version))


def read_latents(values: Mapping[str, Any], scaling: Mapping[str, Any] | None) -> MLASpec:
    """Reads the latent attention; ``scaling`` is that of the rotary embeddings (``RotarySpec.rope_scaling``)."""
    nope, rope = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    return MLASpec(
        q_lora_rank=values.get("q_lora_rank") or None, kv_lora_rank=values["kv_lora_rank"], nope_dim=nope,
        rope_dim=rope, v_dim=values["v_head_dim"], scale=(nope + rope) ** -0.5 * _magnitude(scaling) ** 2,
        interleaved=bool(values.get("rope_interleave", True)))


def _magnitude(scaling: Mapping[str, Any] | None) -> float:
    """Returns YaRN's factor of queries and keys for a stretched context (arXiv:2309.00071, section 3.4). It applies to
    all of their values, while the rotary table can scale only those that it rotates."""
    if not scaling or not scaling.get("mscale_all_dim") or scaling["factor"] <= 1:
        return 1.0
    result: float = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0
    return result


def read_experts(values: Mapping[str, Any], *, version: Version) -> MoESpec | None:
    """Reads the experts; None where no layer has any.

    V2 scores by softmax and its groups by their best expert, V3 by sigmoid, with a bias, and by their two best. V2 as
    published scales weights only where it does not renormalise them.
    """
    first, step = values["first_k_dense_replace"] or 0, values.get("moe_layer_freq") or 1
    layers = tuple(i for i in range(values["num_hidden_layers"]) if i >= first and i % step == 0)
    if kinds := values.get("mlp_layer_types"):  # GLM-4.7-Flash's, in place of the two
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
    if not layers or not values["num_experts"]:
        return None
    renormalize = bool(values["norm_topk_prob"])
    scaling = float(values["routed_scaling_factor"])
    grouped = version == 3 or values["topk_method"] == "group_limited_greedy"
    return MoESpec(
        num_experts=values["num_experts"], top_k=values["num_experts_per_tok"],
        intermediate_size=values["moe_intermediate_size"], layers=layers,
        scoring="sigmoid" if version == 3 else "softmax", renormalize=renormalize,
        scaling_factor=1.0 if version == 2 and renormalize else scaling,
        num_groups=(values.get("n_group") or 1) if grouped else 1,
        top_groups=(values.get("topk_group") or 1) if grouped else 1,
        group_score="top2" if version == 3 else "max", correction_bias=version == 3,
        shared_size=(values.get("n_shared_experts") or 0) * values["moe_intermediate_size"])


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, rms_norm
    from .decoder.latent_attention import LatentSelfAttention
    from .decoder.moe import mixed_mlp

    own: DeepseekSpec = spec.family
    assert spec.mla is not None
    return Blocks(own.rope, rms_norm(own.rms_norm_eps),
                  partial(LatentSelfAttention, bias=own.attention_bias, o_bias=own.o_bias),
                  mixed_mlp(parallel.experts, dense_mlp(bias=own.mlp_bias)), spec.mla.rope_dim)


def tensor_parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
    """Splits experts that transformers stacked."""
    from ..weights.expert_names import by_expert

    return by_expert(name, tensor)


_DEFAULTS = {
    **COMMON, "attention_bias": False, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128}
_V2 = {
    **_DEFAULTS, "intermediate_size": 11008, "vocab_size": 102400, "max_position_embeddings": 2048, "mlp_bias": False,
    "moe_intermediate_size": 1407, "num_experts": 64, "n_shared_experts": 2, "first_k_dense_replace": 0,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "topk_method": "greedy", "eos_token_id": 2}
_V3 = {
    **_DEFAULTS, "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "intermediate_size": 18432, "vocab_size": 129280, "max_position_embeddings": 4096, "moe_intermediate_size": 2048,
    "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8,
    "topk_group": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_interleave": True, "eos_token_id": 1}

_GLM_FLASH = {
    **_V3, "hidden_size": 2048, "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20,
    "intermediate_size": 10240, "vocab_size": 154880, "max_position_embeddings": 202752, "moe_intermediate_size": 1536,
    "num_experts": 64, "num_experts_per_tok": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256}

MODELS.register("DeepseekV2ForCausalLM", "DeepseekV2ForSequenceClassification", "DeepseekV2Model")(
    ModelFamily(partial(read, version=2), blocks, _V2, tensor_parts, title="DeepSeek-V2, V2-Lite",
                notes="multi-head latent attention, mixtures of experts, draft layers"))
MODELS.register("DeepseekV3ForCausalLM", "DeepseekV3ForSequenceClassification", "DeepseekV3Model")(
    ModelFamily(partial(read, version=3), blocks, _V3, tensor_parts, title="DeepSeek-V3, R1, Kimi-K2",
                notes="multi-head latent attention, mixtures of experts, draft layers; Kimi-K2's tokenizer needs "
                      "`--trust-remote-code`"))
MODELS.register("Glm4MoeLiteForCausalLM", "Glm4MoeLiteModel")(
    ModelFamily(partial(read, version=3), blocks, _GLM_FLASH, tensor_parts, title="GLM-4.7-Flash",
                notes="as DeepSeek-V3"))
