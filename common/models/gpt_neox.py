"""GPT-NeoX, Pythia: LayerNorms, a plain MLP, attention and MLP in parallel behind a norm of each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class GPTNeoXSpec:
    """GPT-NeoX's own facts. ``attention_bias`` is that of q, k, v and the output."""

    rope: RotarySpec
    layer_norm_eps: float
    hidden_act: str
    attention_bias: bool
    parallel: bool


def read(config: ModelConfig) -> ModelSpec:
    values = config.values
    older = {"rope_theta": values["rotary_emb_base"], "partial_rotary_factor": values["rotary_pct"]}
    rope = read_rope({**values, **older}, may_be_partial=True)
    own = GPTNeoXSpec(rope, values["layer_norm_eps"], values["hidden_act"], bool(values["attention_bias"]),
                      bool(values["use_parallel_residual"]))
    return config.spec(rope.longest_context, own, num_kv_heads=values["num_attention_heads"])


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, LayerForm, dense_mlp, layer_norm
    from .decoder.self_attention import SelfAttention

    own: GPTNeoXSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias)
    return Blocks(own.rope, layer_norm(own.layer_norm_eps), attention,
                  dense_mlp(bias=True, activation=own.hidden_act, gated=False), form=LayerForm(parallel=own.parallel))


_NAMES = {"gpt_neox.embed_in.": "model.embed_tokens.", "gpt_neox.final_layer_norm.": "model.norm.",
          "gpt_neox.layers.": "model.layers.", "embed_out.": "lm_head.", ".attention.dense.": ".self_attn.o_proj.",
          ".attention.": ".self_attn.", ".mlp.dense_h_to_4h.": ".mlp.up_proj.",
          ".mlp.dense_4h_to_h.": ".mlp.down_proj."}
_BUFFERS = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    from ..weights.fused_tensors import GroupedRows, split_names

    dim, renamed = spec.head_dim, split_names({}, _NAMES)

    def parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
        """A head's query, key and value follow each other."""
        if name.endswith(_BUFFERS):
            return
        for own, part in renamed(name, tensor):
            if ".query_key_value." not in own:
                yield own, part
                continue
            for index, projection in enumerate(("q_proj", "k_proj", "v_proj")):
                yield (own.replace(".query_key_value.", f".{projection}."),
                       GroupedRows(part, 3 * dim, index * dim, (index + 1) * dim))

    return parts


_DEFAULTS = {**COMMON, "vocab_size": 50432, "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
             "num_attention_heads": 64, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
             "rotary_pct": 0.25, "rotary_emb_base": 10000.0, "use_parallel_residual": True, "attention_bias": True,
             "eos_token_id": 2}

MODELS.register("GPTNeoXForCausalLM", "GPTNeoXModel")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="GPT-NeoX, Pythia",
                notes="attention and MLP in parallel behind a norm of each, a quarter of each head rotated"))
