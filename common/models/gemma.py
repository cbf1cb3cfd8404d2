"""Gemma 1 to 3: scaled embeddings, gates by GELU, and norms whose weights are stored less 1; Gemma 2 has norms on both
sides of attention and MLP, capped scores and logits, and a sliding window in every second layer; Gemma 3 has norms of
heads instead of caps, and other rotary embeddings in layers with a window. Of its checkpoints with images, the text."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..api.errors import ConfigError
from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope, read_ropes_of_kinds
from ..config.scores import Scores
from ..config.window import every_full, no_window, window_of_alternating_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class GemmaSpec:
    """Gemma's own facts. ``attention_bias`` is that of q, k, v and the output; ``logits_softcap`` 0: logits are as they
    are; ``out_norms``: what attention and MLP return is normed, too; ``head_norms``: heads of q and k are normed;
    ``sliding_rope``: that of layers with a window, where it is another."""

    rope: RotarySpec
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool = False
    logits_softcap: float = 0.0
    out_norms: bool = False
    head_norms: bool = False
    sliding_rope: RotarySpec | None = None


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    own = GemmaSpec(rope, values["rms_norm_eps"], _activation(config), bool(values["attention_bias"]))
    return config.spec(rope.longest_context, own, windows=no_window(values))


def read_2(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    own = GemmaSpec(rope, values["rms_norm_eps"], _activation(config), bool(values["attention_bias"]),
                    values["final_logit_softcapping"] or 0.0, out_norms=True)
    scores = Scores(values["query_pre_attn_scalar"] ** -0.5, values["attn_logit_softcapping"] or 0.0)
    return config.spec(rope.longest_context, own, windows=window_of_alternating_layers(values), scores=scores)


def read_3(config: ModelConfig) -> ModelSpec:
    values = config.values
    if values.get("use_bidirectional_attention"):
        raise ConfigError("config.json states use_bidirectional_attention, with which tokens see later ones: it is not "
                          "supported.")
    full, sliding = read_ropes_of_kinds(values, values["rope_local_base_freq"])
    own = GemmaSpec(full, values["rms_norm_eps"], _activation(config), bool(values["attention_bias"]),
                    values["final_logit_softcapping"] or 0.0, out_norms=True, head_norms=True, sliding_rope=sliding)
    scores = Scores(values["query_pre_attn_scalar"] ** -0.5, values["attn_logit_softcapping"] or 0.0)
    return config.spec(full.max_position_embeddings, own, windows=every_full(values, 6), scores=scores)


def _activation(config: ModelConfig) -> str:
    """Returns the activation. Gemma 1's first checkpoints state "gelu" and mean its approximation by tanh."""
    values = config.values
    stated: str = values.get("hidden_activation") or values["hidden_act"]
    return "gelu_pytorch_tanh" if stated == "gelu" and not values.get("hidden_activation") else stated


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import PRE_NORM, SANDWICH_NORMS, Blocks, HeadForm, dense_mlp, rms_norm
    from .decoder.embedding_steps import scaled
    from .decoder.self_attention import SelfAttention

    own: GemmaSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias, head_norm_offset=1.0,
                        head_norm_eps=own.rms_norm_eps if own.head_norms else None)
    windows, sliding = spec.windows, own.sliding_rope
    return Blocks(own.rope, rms_norm(own.rms_norm_eps, offset=1.0), attention, dense_mlp(activation=own.hidden_act),
                  form=SANDWICH_NORMS if own.out_norms else PRE_NORM, head=HeadForm(softcap=own.logits_softcap),
                  embedding=(scaled(spec.hidden_size ** 0.5, tokens_only=own.head_norms),),
                  rope_of=None if sliding is None or not windows else (
                      lambda layer: own.rope if windows[layer] is None else sliding))


_GEMMA = {**COMMON, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
          "head_dim": 256, "intermediate_size": 24576, "vocab_size": 256000, "max_position_embeddings": 8192,
          "tie_word_embeddings": True, "attention_bias": False, "eos_token_id": 1,
          "hidden_act": "gelu_pytorch_tanh"}
_GEMMA_2 = {**_GEMMA, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
            "intermediate_size": 9216, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}

_GEMMA_3 = {**_GEMMA_2, "vocab_size": 262208, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0, "final_logit_softcapping": None, "attn_logit_softcapping": None}

MODELS.register("GemmaForCausalLM", "GemmaForSequenceClassification", "GemmaModel")(
    ModelFamily(read, blocks, _GEMMA,
                title="Gemma",
                notes="scaled embeddings, gates by GELU"))
MODELS.register("Gemma2ForCausalLM", "Gemma2ForSequenceClassification", "Gemma2Model")(
    ModelFamily(read_2, blocks, _GEMMA_2,
                title="Gemma 2",
                notes="norms on both sides, capped scores and logits, a sliding window in every second layer"))
MODELS.register("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification", "Gemma3TextModel")(
    ModelFamily(read_3, blocks, _GEMMA_3, title="Gemma 3",
                notes="Gemma 2 with norms of heads instead of caps, full layers of their own rotary embeddings"))
