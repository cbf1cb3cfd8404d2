"""GLM-4 in its forms, and ChatGLM: half of each head rotates, neighbouring values together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.rope import RotarySpec, read_rope
from ..config.window import no_window
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class GlmSpec:
    """GLM's own facts. ``attention_bias`` is that of q, k and v; ``all_biases``: other projections have one, too;
    ``out_norms``: what attention and MLP return is normed, too."""

    rope: RotarySpec
    rms_norm_eps: float
    attention_bias: bool
    all_biases: bool = False
    out_norms: bool = False


def read(config: ModelConfig, *, out_norms: bool) -> ModelSpec:
    check_silu(config)
    values = config.values
    rope = read_rope(values, may_be_partial=True)
    own = GlmSpec(rope, values["rms_norm_eps"], bool(values["attention_bias"]), out_norms=out_norms)
    return config.spec(rope.longest_context, own, windows=no_window(values))


def read_chatglm(config: ModelConfig) -> ModelSpec:
    """Reads the configuration of the checkpoints' own code."""
    values = _common_names(config.values)
    for name, needed in (("rmsnorm", True), ("post_layer_norm", True),
                         ("apply_residual_connection_post_layernorm", False)):
        if values[name] != needed:
            raise ConfigError(f"config.json states {name} {values[name]}: only {needed} is supported.")
    # Checkpoints name the code's class without a head, which generates nevertheless.
    architecture = config.architecture if config.args.is_embedding else "ChatGLMForCausalLM"
    config = dataclasses.replace(config, values=values, architecture=architecture)
    rope = read_rope(values, may_be_partial=True)
    own = GlmSpec(rope, values["layernorm_epsilon"], bool(values["add_qkv_bias"]), bool(values["add_bias_linear"]))
    return config.spec(rope.longest_context, own)


def _common_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with what others name otherwise under their names, too."""
    groups = values["multi_query_group_num"] if values["multi_query_attention"] else values["num_attention_heads"]
    return {**values, "num_hidden_layers": values["num_layers"], "intermediate_size": values["ffn_hidden_size"],
            "head_dim": values["kv_channels"], "num_key_value_heads": groups, "vocab_size": values["padded_vocab_size"],
            "max_position_embeddings": values["seq_length"], "rope_theta": 10000.0 * values["rope_ratio"],
            "partial_rotary_factor": 0.5}


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import PRE_NORM, Blocks, LayerForm, dense_mlp, rms_norm
    from .decoder.self_attention import SelfAttention

    own: GlmSpec = spec.family
    form = LayerForm(attention_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")
    attention = partial(SelfAttention, qkv_bias=own.attention_bias or own.all_biases, o_bias=own.all_biases)
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention, dense_mlp(bias=own.all_biases),
                  form=form if own.out_norms else PRE_NORM)


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """Splits gates from ups, and reorders queries and keys for kernels."""
    from ..weights.fused_tensors import split_names

    gates = dict.fromkeys(("gate_proj", "up_proj"), spec.intermediate_size)
    return _reordered(spec, split_names({"gate_up_proj": gates}))


_CHATGLM_NAMES = {
    "transformer.embedding.word_embeddings.": "model.embed_tokens.", "transformer.encoder.layers.": "model.layers.",
    "transformer.encoder.final_layernorm.": "model.norm.", "transformer.output_layer.": "lm_head.",
    ".self_attention.": ".self_attn.", ".self_attn.dense.": ".self_attn.o_proj.", ".dense_4h_to_h.": ".down_proj."}


def chatglm_parts_of(spec: ModelSpec) -> TensorParts:
    """As ``tensor_parts_of``, with other names, and queries, keys and values in one tensor."""
    from ..weights.fused_tensors import qkv_rows, split_names

    gates = dict.fromkeys(("gate_proj", "up_proj"), spec.intermediate_size)
    split = split_names({"query_key_value": qkv_rows(spec), "dense_h_to_4h": gates}, _CHATGLM_NAMES)

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        return () if name.endswith("rotary_pos_emb.inv_freq") else split(name, tensor)

    return _reordered(spec, parts)


def _reordered(spec: ModelSpec, parts: TensorParts) -> TensorParts:
    from ..weights.interleaved_rotary import halves_of

    own: GlmSpec = spec.family
    return halves_of(spec, own.rope.rotary_dim(spec.head_dim), parts)


_GLM = {
    **COMMON, "vocab_size": 151552, "intermediate_size": 13696, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
    "partial_rotary_factor": 0.5}
_CHATGLM = {
    "num_layers": 28, "padded_vocab_size": 65024, "hidden_size": 4096, "ffn_hidden_size": 13696, "kv_channels": 128,
    "num_attention_heads": 32, "seq_length": 2048, "layernorm_epsilon": 1e-5, "rmsnorm": True, "post_layer_norm": True,
    "apply_residual_connection_post_layernorm": False, "add_bias_linear": False, "add_qkv_bias": False,
    "multi_query_attention": False, "multi_query_group_num": 1, "rope_ratio": 1, "tie_word_embeddings": False}

MODELS.register("GlmForCausalLM", "GlmForSequenceClassification", "GlmModel")(
    ModelFamily(partial(read, out_norms=False), blocks, _GLM, tensor_parts_of=tensor_parts_of, title="GLM-4",
                notes="half of each head rotates"))
MODELS.register("Glm4ForCausalLM", "Glm4ForSequenceClassification", "Glm4Model")(
    ModelFamily(partial(read, out_norms=True), blocks, _GLM, tensor_parts_of=tensor_parts_of,
                title="GLM-4-0414", notes="half of each head rotates; norms on both sides of attention and MLP"))
MODELS.register("ChatGLMForConditionalGeneration", "ChatGLMForCausalLM", "ChatGLMModel")(
    ModelFamily(read_chatglm, blocks, _CHATGLM, tensor_parts_of=chatglm_parts_of, title="ChatGLM 2, 3; GLM-4-9B",
                notes="in the form of the checkpoints' own code; the tokenizer needs `--trust-remote-code`"))
