"""DeepSeek's mixtures of experts behind attention with keys and values: DeepSeek-MoE, GLM-4.5 and 4.6, dots.llm1."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.rope import RotarySpec, read_rope
from ..config.window import Windows, no_window, window_of_flagged_layers
from .deepseek import Version, read_experts, tensor_parts
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class DeepseekMoeSpec:
    """The families' own facts. ``attention_bias`` is that of q, k and v, ``o_bias`` that of the output; ``qk_norm``:
    heads of queries and keys are normed."""

    rope: RotarySpec
    rms_norm_eps: float
    attention_bias: bool
    o_bias: bool
    qk_norm: bool


def read_deepseek(config: ModelConfig) -> ModelSpec:
    values = config.values
    return _read(config, no_window(values), version=2, o_bias=bool(values["attention_bias"]), qk_norm=False)


def read_glm(config: ModelConfig) -> ModelSpec:
    values = config.values
    return _read(config, no_window(values), version=3, o_bias=False, qk_norm=bool(values["use_qk_norm"]))


def read_dots(config: ModelConfig) -> ModelSpec:
    values = config.values
    last = values["max_window_layers"]
    windows = window_of_flagged_layers(values, [layer >= last for layer in range(values["num_hidden_layers"])])
    return _read(config, windows, version=3, o_bias=bool(values["attention_bias"]), qk_norm=True)


def _read(config: ModelConfig, windows: Windows, *, version: Version, o_bias: bool, qk_norm: bool) -> ModelSpec:
    check_silu(config)
    values = config.values
    rope = read_rope(values, may_be_partial=True)
    own = DeepseekMoeSpec(rope, values["rms_norm_eps"], bool(values["attention_bias"]), o_bias, qk_norm)
    return config.spec(rope.longest_context, own, windows=windows, moe=read_experts(values, version=version))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, rms_norm
    from .decoder.moe import mixed_mlp
    from .decoder.self_attention import SelfAttention

    own: DeepseekMoeSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.o_bias,
                        head_norm_eps=own.rms_norm_eps if own.qk_norm else None)
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention, mixed_mlp(parallel.experts))


_DEEPSEEK = {
    **COMMON, "vocab_size": 102400, "intermediate_size": 11008, "num_hidden_layers": 30, "num_key_value_heads": 32,
    "max_position_embeddings": 2048, "attention_bias": False, "moe_intermediate_size": 1407, "num_experts": None,
    "num_experts_per_tok": None, "n_shared_experts": None, "first_k_dense_replace": 0, "moe_layer_freq": 1,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "topk_method": "greedy"}
_GLM = {
    **COMMON, "vocab_size": 151552, "intermediate_size": 10944, "num_hidden_layers": 46, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "attention_bias": False, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "num_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "use_qk_norm": False, "partial_rotary_factor": 0.5}
_DOTS = {
    **COMMON, "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "num_hidden_layers": 62,
    "num_key_value_heads": 32, "max_position_embeddings": 2048, "attention_bias": False, "moe_intermediate_size": 1408,
    "num_experts": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "sliding_window": 4096, "max_window_layers": 62}

MODELS.register("DeepseekForCausalLM", "DeepseekModel")(
    ModelFamily(read_deepseek, blocks, _DEEPSEEK, tensor_parts, title="DeepSeek-MoE",
                notes="DeepSeek's first mixtures of experts, without latent attention"))
MODELS.register("Glm4MoeForCausalLM", "Glm4MoeModel")(
    ModelFamily(read_glm, blocks, _GLM, tensor_parts, title="GLM-4.5, GLM-4.6",
                notes="mixtures of experts; multi-token prediction as DeepSeek-V3's"))
MODELS.register("Dots1ForCausalLM", "Dots1Model")(
    ModelFamily(read_dots, blocks, _DOTS, tensor_parts, title="dots.llm1", notes="mixtures of experts"))
