"""OLMoE: Llama with norms over whole rows of queries and keys, and a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.moe import MoESpec
from ..config.rope import RotarySpec, read_rope
from ..config.window import no_window
from .qwen import tensor_parts
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class OlmoeSpec:
    """OLMoE's own facts. ``attention_bias`` is that of q, k, v and the output; queries, keys and values are kept
    within ``clip_qkv`` of zero, where it is not None."""

    rope: RotarySpec
    rms_norm_eps: float
    attention_bias: bool
    clip_qkv: float | None


def read(config: ModelConfig) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    moe = MoESpec.in_every_layer(values, renormalize=bool(values["norm_topk_prob"]))
    own = OlmoeSpec(rope, values["rms_norm_eps"], bool(values["attention_bias"]), values["clip_qkv"])
    return config.spec(rope.longest_context, own, windows=no_window(values), moe=moe)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, rms_norm
    from .decoder.moe import mixed_mlp
    from .decoder.qkv_steps import clip, in_order, row_norms
    from .decoder.self_attention import SelfAttention

    own: OlmoeSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias,
                        qkv_step=in_order(row_norms(own.rms_norm_eps), clip(own.clip_qkv)))
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention, mixed_mlp(parallel.experts))


_DEFAULTS = {
    **COMMON, "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "attention_bias": False,
    "clip_qkv": None, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "eos_token_id": 50279}

MODELS.register("OlmoeForCausalLM", "OlmoeModel")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts, title="OLMoE",
                notes="mixtures of experts; norms over whole rows of queries and keys"))
