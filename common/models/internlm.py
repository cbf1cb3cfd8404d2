"""InternLM 1 to 3: Llama with biases, or with queries, keys and values of a KV head side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.rope import RotarySpec, read_rope
from ..config.window import no_window
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class InternLMSpec:
    """InternLM's own facts."""

    rope: RotarySpec
    rms_norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool


def read_1(config: ModelConfig) -> ModelSpec:
    bias = bool(config.values["bias"])
    return _read(config, qkv_bias=bias, o_bias=bias, mlp_bias=False)


def read_3(config: ModelConfig) -> ModelSpec:
    bias = bool(config.values["bias"])
    return _read(config, qkv_bias=bool(config.values["qkv_bias"]), o_bias=bias, mlp_bias=bias)


def _read(config: ModelConfig, *, qkv_bias: bool, o_bias: bool, mlp_bias: bool) -> ModelSpec:
    check_silu(config)
    values, rope = config.values, read_rope(config.values)
    own = InternLMSpec(rope, values["rms_norm_eps"], qkv_bias, o_bias, mlp_bias)
    return config.spec(rope.longest_context, own, windows=no_window(values))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, rms_norm
    from .decoder.self_attention import SelfAttention

    own: InternLMSpec = spec.family
    return Blocks(own.rope, rms_norm(own.rms_norm_eps),
                  partial(SelfAttention, qkv_bias=own.qkv_bias, o_bias=own.o_bias), dense_mlp(bias=own.mlp_bias))


def reward_blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from ..layers.classifier_head import ClassifierHead

    return replace(blocks(spec, parallel), classifier=partial(ClassifierHead, "v_head"))


_NAMES_2 = {
    "model.tok_embeddings.": "model.embed_tokens.", "output.": "lm_head.", ".attention.wo.": ".self_attn.o_proj.",
    ".attention.": ".self_attn.", ".attention_norm.": ".input_layernorm.", ".ffn_norm.": ".post_attention_layernorm.",
    ".feed_forward.w1.": ".mlp.gate_proj.", ".feed_forward.w3.": ".mlp.up_proj.",
    ".feed_forward.w2.": ".mlp.down_proj."}


def tensor_parts_of_2(spec: ModelSpec) -> TensorParts:
    """Gives tensors the names that other families' have, and splits the queries, the key and the value of each KV
    head."""
    from ..weights.fused_tensors import grouped_qkv

    return grouped_qkv(spec, "wqkv", _NAMES_2)


_DEFAULTS = {**COMMON, "vocab_size": 103168, "intermediate_size": 11008, "max_position_embeddings": 2048,
             "rms_norm_eps": 1e-6, "bias": True, "eos_token_id": 2}
_DEFAULTS_3 = {**_DEFAULTS, "vocab_size": 128512, "max_position_embeddings": 32768, "bias": False, "qkv_bias": False}

MODELS.register("InternLMForCausalLM", "InternLMModel")(
    ModelFamily(read_1, blocks, _DEFAULTS, title="InternLM", notes="biases in attention"))
MODELS.register("InternLM2ForCausalLM", "InternLM2Model")(
    ModelFamily(read_1, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of_2, title="InternLM 2, 2.5",
                notes="the tokenizer needs `--trust-remote-code`"))
MODELS.register("InternLM2ForRewardModel")(
    ModelFamily(read_1, reward_blocks, {**_DEFAULTS, "num_labels": 1}, tensor_parts_of=tensor_parts_of_2,
                title="InternLM 2 Reward", notes="InternLM 2 with a score; the tokenizer needs `--trust-remote-code`"))
MODELS.register("InternLM3ForCausalLM", "InternLM3Model")(
    ModelFamily(read_3, blocks, _DEFAULTS_3, title="InternLM 3", notes="dense"))
