"""The first Qwen: Llama with biases of q, k and v, and names of its own.

Contexts end with the trained length: its scaling of longer ones (``use_dynamic_ntk``, ``use_logn_attn``) is not
supported.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..api.errors import ConfigError
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class Qwen1Spec:
    """Qwen's own facts. ``no_bias``: only q, k and v have biases."""

    rope: RotarySpec
    norm_eps: float
    no_bias: bool


def read(config: ModelConfig) -> ModelSpec:
    values = config.values
    if values["kv_channels"] * values["num_attention_heads"] != values["hidden_size"]:
        raise ConfigError(f"config.json states kv_channels {values['kv_channels']}: it must be hidden_size divided by "
                          "num_attention_heads.")
    # It states the sum of gates' and ups' values.
    config = dataclasses.replace(config, values={**values, "intermediate_size": values["intermediate_size"] // 2})
    rope = RotarySpec(values["rotary_emb_base"], None, values["seq_length"], values["rotary_pct"])
    return config.spec(values["seq_length"], Qwen1Spec(rope, values["layer_norm_epsilon"], bool(values["no_bias"])))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, rms_norm
    from .decoder.self_attention import SelfAttention

    own: Qwen1Spec = spec.family
    return Blocks(own.rope, rms_norm(own.norm_eps), partial(SelfAttention, qkv_bias=True, o_bias=not own.no_bias),
                  dense_mlp(bias=not own.no_bias))


_NAMES = {
    "transformer.wte.": "model.embed_tokens.", "transformer.h.": "model.layers.", "transformer.ln_f.": "model.norm.",
    ".attn.c_proj.": ".self_attn.o_proj.", ".attn.": ".self_attn.", ".ln_1.": ".input_layernorm.",
    ".ln_2.": ".post_attention_layernorm.", ".mlp.w1.": ".mlp.up_proj.", ".mlp.w2.": ".mlp.gate_proj.",
    ".mlp.c_proj.": ".mlp.down_proj."}


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """Gives tensors the names that other families' have, and splits queries, keys and values."""
    from ..weights.fused_tensors import qkv_rows, split_names

    return split_names({"c_attn": qkv_rows(spec)}, _NAMES)


_DEFAULTS = {
    "vocab_size": 151936, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "kv_channels": 128,
    "intermediate_size": 22016, "layer_norm_epsilon": 1e-6, "rotary_pct": 1.0, "rotary_emb_base": 10000.0,
    "seq_length": 8192, "no_bias": True, "tie_word_embeddings": False}

MODELS.register("QWenLMHeadModel", "QWenModel")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="Qwen 1",
                notes="contexts of the trained length; the tokenizer needs `--trust-remote-code`"))
