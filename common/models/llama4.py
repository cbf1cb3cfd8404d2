"""Llama 4's text models: rotary embeddings in most layers, none in the others, and mixtures of experts that weigh their
inputs.

Layers with rotary embeddings attend within chunks of ``attention_chunk_size`` tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.moe import MoESpec
from ..config.rope import RotarySpec, read_rope
from ..config.window import AttentionChunk
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks

_DEFAULT_CHUNKS = 1
"""Chunks of a context, unless a flag says more tokens: attention beyond one has not run on a GPU."""
_UNCHUNKED_CONTEXT = 131_072
"""Tokens of a context without chunks, unless a flag says more: Scout's rotary table of its 10 million takes 5 GB."""


@dataclass(frozen=True)
class Llama4Spec:
    """Llama 4's own facts. ``rotates`` says of each layer whether it has rotary embeddings; those with them norm heads
    of queries and keys with ``qk_norm``. In the others the query at position p is multiplied by
    ``1 + attn_scale * log(1 + floor((p + 1) / floor_scale))``, unless ``floor_scale`` is 0."""

    rope: RotarySpec
    rms_norm_eps: float
    attention_bias: bool
    rotates: tuple[bool, ...]
    qk_norm: bool
    attn_scale: float
    floor_scale: int


def read(config: ModelConfig) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    count = values["num_hidden_layers"]
    flags = values["no_rope_layers"] or [(i + 1) % values["no_rope_layer_interval"] for i in range(count)]
    own = Llama4Spec(rope, values["rms_norm_eps"], bool(values["attention_bias"]), tuple(map(bool, flags)),
                     bool(values["use_qk_norm"]), values["attn_scale"],
                     values["floor_scale"] if values["attn_temperature_tuning"] else 0)
    experts = _read_experts(values)
    size = values["intermediate_size_mlp"]
    config = dataclasses.replace(config, values={**values, "intermediate_size": size})
    chunk = values["attention_chunk_size"]
    windows = tuple(AttentionChunk(chunk) if rotates else None for rotates in own.rotates) if chunk else ()
    longest = rope.longest_context if config.args.context_length else min(
        rope.longest_context, _DEFAULT_CHUNKS * chunk if chunk else _UNCHUNKED_CONTEXT)
    return config.spec(longest, own, moe=experts, windows=windows)


def _read_experts(values: Mapping[str, Any]) -> MoESpec | None:
    """Reads the experts; None where no layer has any."""
    every = values["interleave_moe_layer_step"]
    layers = values["moe_layers"]
    if layers is None:
        layers = range(every - 1, values["num_hidden_layers"], every) if every else ()
    if not len(layers):
        return None
    return MoESpec(num_experts=values["num_experts"], top_k=values["num_experts_per_tok"],
                   intermediate_size=values["intermediate_size"], layers=tuple(layers), scoring="sigmoid",
                   renormalize=False, weighs_inputs=True, shared_size=values["intermediate_size"],
                   shared_name="shared_expert", router_name="router")


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, rms_norm
    from .decoder.moe import mixed_mlp
    from .decoder.position_steps import NormsOrTemperature
    from .decoder.self_attention import SelfAttention

    own: Llama4Spec = spec.family
    step = NormsOrTemperature(own.rms_norm_eps if own.qk_norm else None, own.attn_scale, own.floor_scale)
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias, position_step=step)
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention, mixed_mlp(parallel.experts),
                  rope_of=lambda layer: own.rope if own.rotates[layer] else None)


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """Gives tensors the names that other families' have, splits stacked experts, and reorders queries and keys of the
    layers that rotate them."""
    from ..weights.expert_names import by_expert
    from ..weights.interleaved_rotary import halves_of

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        return by_expert(name.replace(".feed_forward.", ".mlp."), tensor, transposed=True)

    return halves_of(spec, spec.head_dim, parts)


_DEFAULTS = {
    **COMMON, "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_experts": 16,
    "num_experts_per_tok": 1, "moe_layers": None, "interleave_moe_layer_step": 1, "use_qk_norm": True,
    "no_rope_layers": None, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attention_bias": False,
    "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1, "eos_token_id": 2}

MODELS.register("Llama4ForCausalLM", "Llama4TextModel")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="Llama 4",
                notes="mixtures of experts; attention within chunks, full layers without rotary embeddings; contexts "
                      "of one chunk (8,192 tokens), or of as many tokens as `--context-length` says"))
