"""StarCoder2: LayerNorms, biases, a plain MLP, and one sliding window in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope
from ..config.window import window_of_all_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class Starcoder2Spec:
    """StarCoder2's own facts."""

    rope: RotarySpec
    norm_epsilon: float
    hidden_act: str
    use_bias: bool


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    own = Starcoder2Spec(rope, values["norm_epsilon"], values["hidden_act"], bool(values["use_bias"]))
    return config.spec(rope.longest_context, own, windows=window_of_all_layers(values))


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import Blocks, dense_mlp, layer_norm
    from .decoder.self_attention import SelfAttention

    own: Starcoder2Spec = spec.family
    return Blocks(own.rope, layer_norm(own.norm_epsilon),
                  partial(SelfAttention, qkv_bias=own.use_bias, o_bias=own.use_bias),
                  dense_mlp(bias=own.use_bias, activation=own.hidden_act, gated=False))


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    from ..weights.fused_tensors import split_names

    return split_names({}, {".mlp.c_fc.": ".mlp.up_proj.", ".mlp.c_proj.": ".mlp.down_proj."})


_DEFAULTS = {**COMMON, "vocab_size": 49152, "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 30,
             "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
             "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "use_bias": True, "sliding_window": None,
             "tie_word_embeddings": True, "eos_token_id": 50256}

MODELS.register("Starcoder2ForCausalLM", "Starcoder2ForSequenceClassification", "Starcoder2Model")(
    ModelFamily(read, blocks, _DEFAULTS, tensor_parts_of=tensor_parts_of, title="StarCoder2",
                notes="LayerNorms, a plain MLP, one sliding window in every layer"))
