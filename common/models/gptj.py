"""GPT-J: attention and MLP in parallel behind one LayerNorm, rotary embeddings of neighbouring values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec
from .gpt2 import common_names
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class GPTJSpec:
    """GPT-J's own facts. A head's first ``rotary_dim`` values are rotated."""

    rope: RotarySpec
    norm_eps: float
    activation: str
    rotary_dim: int


def read(config: ModelConfig) -> ModelSpec:
    values = common_names(config.values)
    config = dataclasses.replace(config, values=values)
    own = GPTJSpec(RotarySpec(10000.0, None, values["n_positions"]), values["layer_norm_epsilon"],
                   values["activation_function"], values["rotary_dim"] or config.head_dim)
    return config.spec(values["n_positions"], own)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import PARALLEL, Blocks, HeadForm, dense_mlp, layer_norm
    from .decoder.self_attention import SelfAttention

    own: GPTJSpec = spec.family
    return Blocks(own.rope, layer_norm(own.norm_eps), SelfAttention,
                  dense_mlp(bias=True, activation=own.activation, gated=False), own.rotary_dim, form=PARALLEL,
                  head=HeadForm(bias=True))


_NAMES = {
    "transformer.wte.": "model.embed_tokens.", "transformer.h.": "model.layers.", "transformer.ln_f.": "model.norm.",
    ".attn.out_proj.": ".self_attn.o_proj.", ".attn.": ".self_attn.", ".ln_1.": ".input_layernorm.",
    ".mlp.fc_in.": ".mlp.up_proj.", ".mlp.fc_out.": ".mlp.down_proj."}


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    """Gives tensors the names that other families' have, and reorders queries and keys for kernels."""
    from ..weights.fused_tensors import split_names
    from ..weights.interleaved_rotary import halves_of

    split = split_names({}, _NAMES)

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        is_constant = name.endswith((".attn.bias", ".attn.masked_bias", ".embed_positions"))
        return () if is_constant else split(name, tensor)

    own: GPTJSpec = spec.family
    return halves_of(spec, own.rotary_dim, parts)


_DEFAULTS = {"vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
             "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "eos_token_id": 50256,
             "tie_word_embeddings": False}

MODELS.register("GPTJForCausalLM", "GPTJModel")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="GPT-J",
                notes="attention and MLP in parallel"))
