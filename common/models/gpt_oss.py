"""gpt-oss: attention sinks, a sliding window in every second layer, and experts with biases and clamped gates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.moe import MoESpec
from ..config.rope import RotarySpec, read_rope
from ..config.window import window_of_flagged_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class GptOssSpec:
    """gpt-oss's own facts. ``attention_bias`` is that of q, k and v; ``sinks``: each head has a logit that joins the
    denominator of its softmax."""

    rope: RotarySpec
    rms_norm_eps: float
    attention_bias: bool
    o_bias: bool
    sinks: bool


def read(config: ModelConfig) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    bias = bool(values["attention_bias"])
    own = GptOssSpec(rope, values["rms_norm_eps"], bias, bias, sinks=True)
    alternating = [layer % 2 == 0 for layer in range(values["num_hidden_layers"])]
    return config.spec(rope.longest_context, own, windows=window_of_flagged_layers(values, alternating),
                       moe=read_experts(values))


def read_experts(values: Mapping[str, Any]) -> MoESpec:
    """Reads the experts. A softmax over the chosen experts' logits is that over all of them, renormalized."""
    top_k = values.get("experts_per_token") or values["num_experts_per_tok"]  # the first is OpenAI's own name
    return MoESpec(num_experts=values["num_experts"], top_k=top_k,
                   intermediate_size=values["intermediate_size"], layers=tuple(range(values["num_hidden_layers"])),
                   router_name="router", router_bias=True, expert_bias=True,
                   gate_limit=float(values.get("swiglu_limit") or 7.0))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, rms_norm
    from .decoder.moe import mixed_mlp
    from .decoder.self_attention import SelfAttention

    own: GptOssSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.o_bias, sinks=own.sinks)
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention, mixed_mlp(parallel.experts))


def tensor_parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
    """Splits stacked experts, whose gates and ups are interleaved."""
    from ..weights.interleaved_experts import by_interleaved_expert

    return by_interleaved_expert(name, tensor)


_DEFAULTS = {
    **COMMON, "hidden_size": 2880, "num_hidden_layers": 36, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "attention_bias": True, "sliding_window": 128, "num_experts": 128, "num_experts_per_tok": 4,
    "rope_theta": 150000.0, "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096}}

MODELS.register("GptOssForCausalLM", "GptOssForSequenceClassification", "GptOssModel")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts,
                title="gpt-oss 20b, 120b",
                notes="attention sinks, a sliding window in every second layer, experts with biases and clamped gates"))
