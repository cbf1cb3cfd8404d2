"""SmolLM3: Llama without rotary embeddings in every fourth layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope
from ..config.window import window_of_flagged_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class SmolLM3Spec:
    """SmolLM3's own facts. ``attention_bias`` is that of q, k, v and the output; ``rotated`` says it of each layer."""

    rope: RotarySpec
    rms_norm_eps: float
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    rotated: tuple[bool, ...]


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    every = values["no_rope_layer_interval"]
    rotated = tuple(map(bool, values.get("no_rope_layers") or (
        (layer + 1) % every for layer in range(values["num_hidden_layers"]))))  # 1 has rotary embeddings
    own = SmolLM3Spec(rope, values["rms_norm_eps"], values["hidden_act"], bool(values["attention_bias"]),
                      bool(values["mlp_bias"]), rotated)
    windows = window_of_flagged_layers(values, [not each for each in rotated]) if values["use_sliding_window"] else ()
    return config.spec(rope.longest_context, own, windows=windows)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, rms_norm
    from .decoder.self_attention import SelfAttention

    own: SmolLM3Spec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias)
    return Blocks(own.rope, rms_norm(own.rms_norm_eps), attention,
                  dense_mlp(bias=own.mlp_bias, activation=own.hidden_act),
                  rope_of=lambda layer: own.rope if own.rotated[layer] else None)


_DEFAULTS = {**COMMON, "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
             "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32768,
             "rope_theta": 2000000.0, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
             "use_sliding_window": False, "sliding_window": None, "no_rope_layer_interval": 4,
             "eos_token_id": 128001}

MODELS.register("SmolLM3ForCausalLM", "SmolLM3ForSequenceClassification", "SmolLM3Model")(
    ModelFamily(read, blocks, _DEFAULTS, title="SmolLM3", notes="every fourth layer has no rotary embeddings"))
