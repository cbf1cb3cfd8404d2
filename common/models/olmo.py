"""OLMo 1, 2 and 3: OLMo has LayerNorms without weights, OLMo 2 norms after attention and MLP and over whole rows of
queries and keys, OLMo 3 also sliding windows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope, read_ropes_of_kinds
from ..config.window import every_full
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class OlmoSpec:
    """OLMo's own facts. ``attention_bias`` is that of q, k, v and the output; ``sliding_rope`` that of layers with a
    window, where there are some."""

    rope: RotarySpec
    hidden_act: str
    attention_bias: bool
    clip_qkv: float | None = None
    rms_norm_eps: float = 0.0
    sliding_rope: RotarySpec | None = None


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    own = OlmoSpec(rope, values["hidden_act"], bool(values["attention_bias"]), values["clip_qkv"])
    return config.spec(rope.longest_context, own)


def read_2(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    own = OlmoSpec(rope, values["hidden_act"], bool(values["attention_bias"]), rms_norm_eps=values["rms_norm_eps"])
    return config.spec(rope.longest_context, own)


def read_3(config: ModelConfig) -> ModelSpec:
    values = config.values
    full, sliding = read_ropes_of_kinds(values, values["rope_theta"])
    own = OlmoSpec(full, values["hidden_act"], bool(values["attention_bias"]), rms_norm_eps=values["rms_norm_eps"],
                   sliding_rope=sliding)
    return config.spec(full.longest_context, own, windows=every_full(values, 4))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, layer_norm
    from .decoder.qkv_steps import clip
    from .decoder.self_attention import SelfAttention

    own: OlmoSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias,
                        qkv_step=clip(own.clip_qkv))
    return Blocks(own.rope, layer_norm(_EPS, weight=False, bias=False), attention,
                  dense_mlp(activation=own.hidden_act))


def blocks_2(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import POST_NORMS, Blocks, dense_mlp, rms_norm
    from .decoder.qkv_steps import row_norms
    from .decoder.self_attention import SelfAttention

    own: OlmoSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias,
                        qkv_step=row_norms(own.rms_norm_eps))
    windows = spec.windows
    sliding = own.sliding_rope
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention, dense_mlp(activation=own.hidden_act),
                  form=POST_NORMS, rope_of=None if sliding is None or not windows else (
                      lambda layer: own.rope if windows[layer] is None else sliding))


_EPS = 1e-5
"""OLMo's own, whatever its configuration says."""
_OLMO = {**COMMON, "vocab_size": 50304, "intermediate_size": 11008, "max_position_embeddings": 2048,
         "attention_bias": False, "clip_qkv": None, "eos_token_id": 50279}
_OLMO_2 = {**_OLMO, "rms_norm_eps": 1e-5}
_OLMO_3 = {**_OLMO_2, "rope_theta": 500000.0, "sliding_window": 4096}

MODELS.register("OlmoForCausalLM", "OlmoModel")(
    ModelFamily(read, blocks, _OLMO, title="OLMo", notes="LayerNorms without weights"))
MODELS.register("Olmo2ForCausalLM", "Olmo2Model")(
    ModelFamily(read_2, blocks_2, _OLMO_2, title="OLMo 2",
                notes="norms after attention and MLP, and of whole rows of q and k"))
MODELS.register("Olmo3ForCausalLM", "Olmo3Model")(
    ModelFamily(read_3, blocks_2, _OLMO_3, title="OLMo 3", notes="OLMo 2 with a sliding window in 3 of 4 layers"))
