"""Command-R, R+ and R7B, Aya: attention and MLP in parallel behind one LayerNorm without bias, interleaved rotary
embeddings, scaled logits; R7B rotates in layers with a sliding window alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ..config.defaults import COMMON
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.rope import RotarySpec, read_rope
from ..config.window import every_full
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    from ..distributed.parallel import Parallel
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks


@dataclass(frozen=True)
class CohereSpec:
    """Cohere's own facts. ``attention_bias`` is that of q, k, v and the output; ``head_norms``: each head of q and k
    has a norm of its own; ``rotates_windows``: layers without a window have no rotary embeddings."""

    rope: RotarySpec
    layer_norm_eps: float
    hidden_act: str
    attention_bias: bool
    logit_scale: float
    head_norms: bool = False
    rotates_windows: bool = False


def read(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    own = CohereSpec(rope, values["layer_norm_eps"], values["hidden_act"], bool(values["attention_bias"]),
                     values["logit_scale"], bool(values["use_qk_norm"]))
    return config.spec(rope.longest_context, own)


def read_2(config: ModelConfig) -> ModelSpec:
    values, rope = config.values, read_rope(config.values)
    own = CohereSpec(rope, values["layer_norm_eps"], values["hidden_act"], bool(values["attention_bias"]),
                     values["logit_scale"], rotates_windows=True)
    return config.spec(rope.longest_context, own, windows=every_full(values, 4),
                       head_dim=values["hidden_size"] // values["num_attention_heads"])


def blocks(spec: ModelSpec, parallel: Parallel) -> Blocks:
    from .decoder.blocks import PARALLEL, Blocks, HeadForm, dense_mlp, layer_norm
    from .decoder.qkv_steps import each_head_norms
    from .decoder.self_attention import SelfAttention

    own: CohereSpec = spec.family
    attention = partial(SelfAttention, qkv_bias=own.attention_bias, o_bias=own.attention_bias,
                        qkv_step=each_head_norms(own.layer_norm_eps) if own.head_norms else None)
    windows = spec.windows

    def rope_of(layer: int) -> RotarySpec | None:
        return own.rope if not own.rotates_windows or (windows and windows[layer] is not None) else None

    return Blocks(own.rope, layer_norm(own.layer_norm_eps, bias=False), attention, dense_mlp(activation=own.hidden_act),
                  form=PARALLEL, head=HeadForm(multiplier=own.logit_scale), rope_of=rope_of)


def tensor_parts_of(spec: ModelSpec) -> TensorParts:
    from ..weights.interleaved_rotary import halves_of

    own: CohereSpec = spec.family
    return halves_of(spec, own.rope.rotary_dim(spec.head_dim), norms=("q_norm", "k_norm"))


_COHERE = {**COMMON, "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40,
           "num_attention_heads": 64, "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "logit_scale": 0.0625,
           "tie_word_embeddings": True, "attention_bias": False, "use_qk_norm": False, "eos_token_id": 255001}

MODELS.register("CohereForCausalLM", "CohereModel")(
    ModelFamily(read, blocks, {**_COHERE, "rope_theta": 500000.0}, tensor_parts_of=tensor_parts_of,
                title="Command-R, R+, Aya", notes="attention and MLP in parallel, interleaved rotary embeddings"))
MODELS.register("Cohere2ForCausalLM", "Cohere2Model")(
    ModelFamily(read_2, blocks, {**_COHERE, "sliding_window": 4096}, tensor_parts_of=tensor_parts_of,
                title="Command-R7B, Command-A",
                notes="Command-R with sliding windows, and full layers without rotary embeddings"))
