"""Gemma 1 and 2: scaled embeddings, gates by GELU, and norms whose weights are stored less 1; Gemma 2 has norms on both
sides of attention and MLP, capped scores and logits, and a sliding window in every second layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope
from ..config.scores import Scores
from ..config.window import no_window, window_of_alternating_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    import torch

    from ..distributed.parallel import Parallel
    from .decoder.blocks import Blocks
    from .decoder.causal_lm import CausalLM


@dataclass(frozen=True)
class GemmaSpec:
    """Gemma's own facts. ``attention_bias`` is that of q, k, v and the output; ``logits_softcap`` 0: logits are as they
    are; ``out_norms``: what attention and MLP return is normed, too."""

    rope: RotarySpec
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool = False
    logits_softcap: float = 0.0
    out_norms: bool = False


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


def _activation(config: ModelConfig) -> str:
    """Returns the activation. Gemma 1's first checkpoints state "gelu" and mean its approximation by tanh."""
    values = config.values
    stated: str = values.get("hidden_activation") or values["hidden_act"]
    return "gelu_pytorch_tanh" if stated == "gelu" and not values.get("hidden_activation") else stated


def build(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> CausalLM:
    from .decoder.causal_lm import CausalLM

    return CausalLM(spec, parallel, dtype, device, blocks(spec, parallel))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import PRE_NORM, SANDWICH_NORMS, Blocks, HeadForm, dense_mlp, rms_norm
    from .decoder.embedding_steps import scaled
    from .decoder.self_attention import SelfAttention

    own: GemmaSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias)
    return Blocks(own.rope, rms_norm(own.rms_norm_eps, offset=1.0), attention, dense_mlp(activation=own.hidden_act),
                  form=SANDWICH_NORMS if own.out_norms else PRE_NORM, head=HeadForm(softcap=own.logits_softcap),
                  embedding=(scaled(spec.hidden_size ** 0.5),))


_GEMMA = {**COMMON, "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16,
          "head_dim": 256, "intermediate_size": 24576, "vocab_size": 256000, "max_position_embeddings": 8192,
          "tie_word_embeddings": True, "attention_bias": False, "eos_token_id": 1,
          "hidden_act": "gelu_pytorch_tanh"}
_GEMMA_2 = {**_GEMMA, "hidden_size": 2304, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
            "intermediate_size": 9216, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}

MODELS.register("GemmaForCausalLM", "GemmaForSequenceClassification", "GemmaModel")(
    ModelFamily(read, build, blocks, _GEMMA,
                title="Gemma",
                notes="scaled embeddings, gates by GELU"))
MODELS.register("Gemma2ForCausalLM", "Gemma2ForSequenceClassification", "Gemma2Model")(
    ModelFamily(read_2, build, blocks, _GEMMA_2,
                title="Gemma 2",
                notes="norms on both sides, capped scores and logits, a sliding window in every second layer"))
