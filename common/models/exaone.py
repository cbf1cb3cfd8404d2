"""EXAONE 3 and 4: EXAONE 3 is Llama by other names, EXAONE 4 has norms after attention and MLP, normed heads, and may
have sliding windows, which alone are rotated then."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope
from ..config.window import Windows, window_of_flagged_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class ExaoneSpec:
    """EXAONE's own facts; ``is_4``: norms are those of EXAONE 4."""

    rope: RotarySpec
    norm_eps: float
    hidden_act: str
    is_4: bool = False


def read(config: ModelConfig) -> ModelSpec:
    given = config.values
    values = {**given, "num_hidden_layers": given["num_layers"]}
    rope = read_rope(values)
    own = ExaoneSpec(rope, values["layer_norm_epsilon"], values["activation_function"])
    return ModelConfig(config.architecture, values, config.eos_token_ids, config.args).spec(rope.longest_context, own)


def read_4(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    own = ExaoneSpec(rope, values["rms_norm_eps"], values["hidden_act"], is_4=True)
    return config.spec(rope.longest_context, own, windows=_windows(config))


def _windows(config: ModelConfig) -> Windows:
    """Reads ``layer_types``, else ``sliding_window_pattern``: a number (each such layer is a full one), or letters, of
    which "L" is a layer with a window."""
    values = config.values
    pattern = values["sliding_window_pattern"]
    if values["sliding_window"] is None:
        return ()
    layers = range(values["num_hidden_layers"])
    if isinstance(pattern, str):
        slides = [pattern[layer % len(pattern)] == "L" for layer in layers]
    else:
        slides = [bool(pattern) and (layer + 1) % pattern != 0 for layer in layers]
    return window_of_flagged_layers(values, slides)


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import POST_NORMS, PRE_NORM, Blocks, dense_mlp, rms_norm
    from .decoder.self_attention import SelfAttention

    own: ExaoneSpec = spec.family
    windows = spec.windows
    attention = partial(SelfAttention, head_norm_eps=own.norm_eps if own.is_4 else None)
    return Blocks(own.rope, rms_norm(own.norm_eps), attention, dense_mlp(activation=own.hidden_act),
                  form=POST_NORMS if own.is_4 else PRE_NORM,
                  rope_of=(lambda layer: own.rope if windows[layer] is not None else None) if windows else None)


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    from ..weights.fused_tensors import split_names

    return split_names({}, {
        "transformer.wte.": "model.embed_tokens.", "transformer.ln_f.": "model.norm.",
        "transformer.h.": "model.layers.", ".attn.attention.out_proj.": ".self_attn.o_proj.",
        ".attn.attention.": ".self_attn.", ".ln_1.": ".input_layernorm.", ".ln_2.": ".post_attention_layernorm.",
        ".mlp.c_fc_0.": ".mlp.gate_proj.", ".mlp.c_fc_1.": ".mlp.up_proj.", ".mlp.c_proj.": ".mlp.down_proj."})


_EXAONE = {**COMMON, "vocab_size": 102400, "hidden_size": 2048, "num_layers": 32, "intermediate_size": 8192,
           "max_position_embeddings": 2048, "activation_function": "silu", "layer_norm_epsilon": 1e-5,
           "tie_word_embeddings": True, "eos_token_id": 2}
_EXAONE_4 = {**COMMON, "vocab_size": 102400, "intermediate_size": 16384, "num_key_value_heads": 32,
             "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096,
             "sliding_window_pattern": 4, "eos_token_id": 2}

MODELS.register("ExaoneForCausalLM")(
    ModelFamily(read, blocks, _EXAONE, tensor_parts_of=tensor_parts_of, title="EXAONE 3, 3.5, Deep",
                notes="Llama by other names"))
MODELS.register("Exaone4ForCausalLM", "Exaone4ForSequenceClassification", "Exaone4Model")(
    ModelFamily(read_4, blocks, _EXAONE_4, title="EXAONE 4",
                notes="norms after attention and MLP; full layers beside sliding windows are not rotated"))
