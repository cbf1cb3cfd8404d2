"""GPT-2, and GPT-BigCode (StarCoder, SantaCoder) with one KV head: learned positions and LayerNorms."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec
from ..config.scores import Scores
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class GPT2Spec:
    """GPT-2's own facts. ``n_positions`` have learned embeddings. ``rope`` is none's."""

    rope: RotarySpec
    norm_eps: float
    activation: str
    n_positions: int


def read(config: ModelConfig) -> ModelSpec:
    return _read(config, config.values["n_head"])


def read_bigcode(config: ModelConfig) -> ModelSpec:
    return _read(config, 1 if config.values["multi_query"] else config.values["n_head"])


def _read(config: ModelConfig, num_kv_heads: int) -> ModelSpec:
    values = common_names(config.values)
    config = dataclasses.replace(config, values=values)
    if values.get("scale_attn_by_inverse_layer_idx"):
        raise ConfigError("config.json states scale_attn_by_inverse_layer_idx, which is not supported.")
    if values.get("add_cross_attention"):
        raise ConfigError("config.json states add_cross_attention: only decoders are supported.")
    positions = values["n_positions"]
    own = GPT2Spec(RotarySpec(10000.0, None, positions), values["layer_norm_epsilon"], values["activation_function"],
                   positions)
    return config.spec(positions, own, num_kv_heads=num_kv_heads,
                       scores=Scores(None if values["scale_attn_weights"] else 1.0))


def common_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the configuration with what others name otherwise under their names, too."""
    return {**values, "hidden_size": values["n_embd"], "num_hidden_layers": values["n_layer"],
            "num_attention_heads": values["n_head"], "intermediate_size": values["n_inner"] or 4 * values["n_embd"]}


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, layer_norm
    from .decoder.embedding_steps import learned_positions
    from .decoder.self_attention import SelfAttention

    own: GPT2Spec = spec.family
    return Blocks(own.rope, layer_norm(own.norm_eps), partial(SelfAttention, qkv_bias=True, o_bias=True),
                  dense_mlp(bias=True, activation=own.activation, gated=False), rope_of=lambda layer: None,
                  embedding=(learned_positions("model.embed_positions", own.n_positions),))


_NAMES = {
    "model.wte.": "model.embed_tokens.", "model.wpe.": "model.embed_positions.", "model.h.": "model.layers.",
    "model.ln_f.": "model.norm.", ".attn.c_proj.": ".self_attn.o_proj.", ".attn.": ".self_attn.",
    ".ln_1.": ".input_layernorm.", ".ln_2.": ".post_attention_layernorm.", ".mlp.c_fc.": ".mlp.up_proj.",
    ".mlp.c_proj.": ".mlp.down_proj."}
_PREFIX = re.compile(r"^(transformer\.|model\.)?(?=wte|wpe|h\.|ln_f)")
_MASK = re.compile(r"\.attn\.(masked_)?bias$")
"""Constants that early checkpoints hold."""


def bigcode_parts_of(spec: ModelSpec) -> TensorParts:
    """Gives tensors the names that other families' have, and splits queries, keys and values: of all heads where they
    share one key, else head by head."""
    from ..weights.fused_tensors import grouped_qkv, qkv_rows, split_names

    shares_key = spec.num_kv_heads == 1
    split = split_names({"c_attn": qkv_rows(spec)}, _NAMES) if shares_key else grouped_qkv(spec, "c_attn", _NAMES)

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        return () if _MASK.search(name) else split(_PREFIX.sub("model.", name), tensor)

    return parts


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """As ``bigcode_parts_of``, of matrices with inputs before outputs."""
    from ..weights.fused_tensors import Transposed, qkv_rows, split_names

    split = split_names({"c_attn": qkv_rows(spec)}, _NAMES)

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        if _MASK.search(name):
            return ()
        is_conv = re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name)
        return split(_PREFIX.sub("model.", name), Transposed(tensor) if is_conv else tensor)

    return parts


_GPT2 = {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
         "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
         "eos_token_id": 50256, "tie_word_embeddings": True}
_BIGCODE = {**_GPT2, "activation_function": "gelu_pytorch_tanh", "multi_query": True}

MODELS.register("GPT2LMHeadModel", "GPT2Model")(
    ModelFamily(read, blocks, _GPT2, tensor_parts_of=tensor_parts_of, title="GPT-2",
                notes="learned positions, LayerNorms"))
MODELS.register("GPTBigCodeForCausalLM", "GPTBigCodeModel")(
    ModelFamily(read_bigcode, blocks, _BIGCODE, tensor_parts_of=bigcode_parts_of,
                title="GPT-BigCode (StarCoder)", notes="as GPT-2, with one KV head"))
