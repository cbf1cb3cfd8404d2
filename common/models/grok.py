"""Grok-1: scaled embeddings and logits, capped scores, norms on both sides of attention and experts, which are gated by
GELU (https://github.com/xai-org/grok-1, as converted for transformers)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..api.errors import ConfigError
from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.moe import MoESpec
from ..config.rope import RotarySpec, read_rope
from ..config.scores import Scores
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.lazy import LazyTensor
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class GrokSpec:
    """Grok's own facts; ``logits_softcap`` 0: logits are as they are."""

    rope: RotarySpec
    rms_norm_eps: float
    embedding_multiplier: float
    logits_multiplier: float
    logits_softcap: float


def read(config: ModelConfig) -> ModelSpec:
    values = config.values
    for key in ("residual_moe", "rope_type", "rope_rotate_half_dims"):
        if values.get(key):
            raise ConfigError(f"config.json states {key} {values[key]!r}, which later Groks have: it is not supported.")
    if (values.get("attn_temperature_len") or 0) > 0 or values.get("attn_logit_softcapping_method", "tanh") != "tanh":
        raise ConfigError("config.json states attn_temperature_len or another attn_logit_softcapping_method than "
                          "'tanh': they are not supported.")
    rope = read_rope(values)
    cap = values.get("attn_logit_softcapping", values["max_attn_value"])
    moe = MoESpec(num_experts=values["num_experts"], top_k=values["num_experts_per_tok"],
                  intermediate_size=values.get("moe_intermediate_size") or values["intermediate_size"],
                  layers=tuple(range(values["num_hidden_layers"])), renormalize=False,
                  activation="gelu_pytorch_tanh", router_softcap=values["router_logit_softcapping"] or 0.0)
    own = GrokSpec(rope, values["rms_norm_eps"], values["embedding_multiplier_scale"],
                   values["output_multiplier_scale"], values["final_logit_softcapping"] or 0.0)
    return config.spec(rope.longest_context, own, moe=moe, scores=Scores(values["attn_output_multiplier"],
                                                                        max(cap or 0.0, 0.0)))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, HeadForm, LayerForm, rms_norm
    from .decoder.embedding_steps import scaled
    from .decoder.moe import mixed_mlp
    from .decoder.self_attention import SelfAttention

    own: GrokSpec = spec.family
    form = LayerForm(input_norm="pre_attn_norm", attention_out_norm="post_attn_norm", mlp_norm="pre_moe_norm",
                     mlp_out_norm="post_moe_norm")
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), SelfAttention, mixed_mlp(parallel.experts), form=form,
                  head=HeadForm(multiplier=own.logits_multiplier, softcap=own.logits_softcap),
                  embedding=(scaled(own.embedding_multiplier),))


_PROJECTIONS = {"linear": "gate_proj", "linear_v": "up_proj", "linear_1": "down_proj",
                "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_EXPERT = re.compile(r"(\.experts\.\d+)\.(linear|linear_v|linear_1|w[123])\.")


def tensor_parts(name: str, tensor: LazyTensor) -> Iterable[tuple[str, LazyTensor]]:
    """Gives tensors the names that other families' have; conversions differ in them."""
    for module in (".moe_block.", ".block_sparse_moe."):
        name = name.replace(module, ".mlp.")
    name = name.replace(".attn.", ".self_attn.")
    name = re.sub(r"norm\.scale$", "norm.weight", name)
    yield _EXPERT.sub(lambda found: f"{found[1]}.{_PROJECTIONS[found[2]]}.", name), tensor


_DEFAULTS = {
    **COMMON, "vocab_size": 131072, "hidden_size": 6144, "intermediate_size": 32768, "num_hidden_layers": 64,
    "num_attention_heads": 48, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "eos_token_id": 2, "num_experts": 8, "num_experts_per_tok": 2,
    "attn_output_multiplier": None, "max_attn_value": 30.0, "embedding_multiplier_scale": 78.38367176906169,
    "output_multiplier_scale": 0.5773502691896257, "router_logit_softcapping": 30.0, "final_logit_softcapping": None}

MODELS.register("Grok1ModelForCausalLM", "Grok1ForCausalLM")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts, title="Grok-1",
                notes="mixtures of experts gated by GELU; capped scores, multipliers of embeddings and logits"))
