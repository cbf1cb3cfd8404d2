"""MiniCPM: Llama with multipliers of embeddings, residual branches and logits; MiniCPM 3 with latent attention."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..api.errors import ConfigError
from ..config.defaults import COMMON
from ..config.mla import MLASpec
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig, check_silu
from ..config.rope import RotarySpec, read_rope
from ..config.window import no_window
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class MiniCPMSpec:
    """MiniCPM's own facts. ``attention_bias`` is that of q, k, v and the output, with latents of the projections to
    them. The multipliers are those of embeddings, of what attention and MLP return, and of logits."""

    rope: RotarySpec
    rms_norm_eps: float
    attention_bias: bool
    embedding_multiplier: float
    residual_multiplier: float
    logits_multiplier: float


def read(config: ModelConfig) -> ModelSpec:
    if config.values.get("num_experts"):
        raise ConfigError("MiniCPM's mixtures of experts are not supported: use a dense checkpoint.")
    own = _read_own(config)
    return config.spec(own.rope.longest_context, own, windows=no_window(config.values))


def read_3(config: ModelConfig) -> ModelSpec:
    values, own = config.values, _read_own(config)
    nope, rope = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    mla = MLASpec(q_lora_rank=values["q_lora_rank"], kv_lora_rank=values["kv_lora_rank"], nope_dim=nope, rope_dim=rope,
                  v_dim=values["v_head_dim"] or values["hidden_size"] // values["num_attention_heads"],
                  scale=(nope + rope) ** -0.5, interleaved=False)
    return config.spec(own.rope.longest_context, own, num_kv_heads=1, head_dim=mla.qk_dim, mla=mla,
                       windows=no_window(values))


def _read_own(config: ModelConfig) -> MiniCPMSpec:
    check_silu(config)
    values = config.values
    residual = values["scale_depth"] / math.sqrt(values["num_hidden_layers"]) if values["scale_depth"] else 1.0
    logits = values["dim_model_base"] / values["hidden_size"] if values["dim_model_base"] else 1.0
    return MiniCPMSpec(read_rope(values), values["rms_norm_eps"], bool(values["attention_bias"]), values["scale_emb"],
                       residual, logits)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, HeadForm, LayerForm, MakeAttention, dense_mlp, rms_norm
    from .decoder.embedding_steps import scaled
    from .decoder.latent_attention import LatentSelfAttention
    from .decoder.self_attention import SelfAttention

    own: MiniCPMSpec = spec.family
    bias = own.attention_bias
    attention: MakeAttention = partial(SelfAttention, qkv_bias=bias, o_bias=bias)
    if spec.mla is not None:
        attention = partial(LatentSelfAttention, bias=bias, o_bias=bias)
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention, dense_mlp(),
                  None if spec.mla is None else spec.mla.rope_dim,
                  form=LayerForm(residual_multiplier=own.residual_multiplier),
                  head=HeadForm(multiplier=own.logits_multiplier), embedding=(scaled(own.embedding_multiplier),))


_MULTIPLIERS = {"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1}
_DEFAULTS = {**COMMON, "intermediate_size": 11008, "max_position_embeddings": 2048, "attention_bias": False,
             "tie_word_embeddings": True, "eos_token_id": 2, **_MULTIPLIERS}
_DEFAULTS_3 = {
    **_DEFAULTS, "vocab_size": 73448, "hidden_size": 2560, "intermediate_size": 6400, "num_hidden_layers": 62,
    "num_attention_heads": 40, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "kv_lora_rank": 256,
    "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": None, "scale_emb": 12,
    "scale_depth": 1.4, "dim_model_base": 256}

MODELS.register("MiniCPMForCausalLM", "MiniCPMModel")(
    ModelFamily(read, blocks, _DEFAULTS, title="MiniCPM 1, 2, 4",
                notes="multipliers of embeddings, residual branches and logits; dense attention"))
MODELS.register("MiniCPM3ForCausalLM", "MiniCPM3Model")(
    ModelFamily(read_3, blocks, _DEFAULTS_3, title="MiniCPM 3", notes="multi-head latent attention"))
