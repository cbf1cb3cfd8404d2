"""Granite 3: Llama with multipliers of embeddings, residual branches, scores and logits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope
from ..config.scores import Scores
from ..config.window import no_window
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class GraniteSpec:
    """Granite's own facts, named as in its config.json. ``attention_bias`` is that of q, k, v and the output."""

    rope: RotarySpec
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    own = GraniteSpec(rope, values["rms_norm_eps"], values["hidden_act"], bool(values["attention_bias"]),
                      bool(values["mlp_bias"]), values["embedding_multiplier"], values["residual_multiplier"],
                      values["logits_scaling"])
    return config.spec(rope.longest_context, own, windows=no_window(values),
                       scores=Scores(values["attention_multiplier"]))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, HeadForm, LayerForm, dense_mlp, rms_norm
    from .decoder.embedding_steps import scaled
    from .decoder.self_attention import SelfAttention

    own: GraniteSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias)
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention,
                  dense_mlp(bias=own.mlp_bias, activation=own.hidden_act),
                  form=LayerForm(residual_multiplier=own.residual_multiplier),
                  head=HeadForm(multiplier=1 / own.logits_scaling), embedding=(scaled(own.embedding_multiplier),))


_DEFAULTS = {**COMMON, "intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False,
             "mlp_bias": False, "eos_token_id": 2, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
             "logits_scaling": 1.0, "attention_multiplier": 1.0}

MODELS.register("GraniteForCausalLM", "GraniteModel")(ModelFamily(read, blocks, _DEFAULTS,
                title="Granite 3",
                notes="multipliers of embeddings, residual branches, scores and logits"))
