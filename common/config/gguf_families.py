"""Architectures of GGUF files that are served: what Hugging Face's files call their tensors and values.

Names are those of llama.cpp's ``gguf-py/gguf/constants.py``, what is changed in a tensor is what its converter does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..api.errors import ConfigError
from .gguf_file import GgufFile, read_floats

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_OF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all of Llama 3.1 to 3.3 have; a GGUF file holds the factors that follow from it."""


def _nothing(file: GgufFile) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class GgufFamily:
    """A ``general.architecture``: Hugging Face's name of it, and further values of its config.json.

    ``pairs_heads``: rows of q and k are stored with the two values of a rotation side by side. ``added_to_norms``:
    what norms' weights are stored with added.
    """

    architecture: str
    model_type: str
    values: Callable[[GgufFile], dict[str, Any]] = _nothing
    pairs_heads: bool = False
    added_to_norms: float = 0.0
    names: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, name: str) -> str | None:
        """Returns Hugging Face's name of a tensor; None for one that the model computes itself. A stack of experts has
        that of a projection with ``*`` for the expert."""
        top, _, kind = name.rpartition(".")
        if top in _TOP:
            return f"{_TOP[top]}.{kind}"
        if name in _COMPUTED or not (match := _OF_LAYER.fullmatch(name)):
            return None if name in _COMPUTED else name
        layer, tensor, kind = match.groups()
        if tensor in _EXPERTS:
            return f"model.layers.{layer}.mlp.experts.*.{_EXPERTS[tensor]}.{kind}"
        return f"model.layers.{layer}.{self.names.get(tensor) or _LAYER.get(tensor, tensor)}.{kind}"


def _llama(file: GgufFile) -> dict[str, Any]:
    values: dict[str, Any] = {"attention_bias": "blk.0.attn_output.bias" in file.tensors,
                              "mlp_bias": "blk.0.ffn_down.bias" in file.tensors}
    if (factors := file.tensors.get("rope_freqs.weight")) is not None:
        values["rope_scaling"] = _llama3_scaling(file, read_floats(factors))
    return values


def _llama3_scaling(file: GgufFile, stored: list[float]) -> dict[str, Any]:
    """Returns the scaling that makes the ``stored`` divisors of the frequencies; raises ConfigError where none does."""
    scaling = {"rope_type": "llama3", "factor": round(max(stored), 4), **_LLAMA3}
    original, low, high = (_LLAMA3[name] for name in ("original_max_position_embeddings", "low_freq_factor",
                                                      "high_freq_factor"))
    base = float(file.get("rope.freq_base", 10000.0))
    for index, found in enumerate(stored):
        turns = original * base ** (-index / len(stored)) / (2 * math.pi)
        share = min(max((turns - low) / (high - low), 0.0), 1.0)
        wanted = 1 / ((1 - share) / scaling["factor"] + share)
        if abs(found - wanted) > 1e-3 * wanted:
            raise ConfigError("The GGUF file scales rotary frequencies in another way than Llama 3 does, which is not "
                              "supported: use the checkpoint in safetensors.")
    return scaling


def _experts(renormalizes: bool) -> Callable[[GgufFile], dict[str, Any]]:
    def values(file: GgufFile) -> dict[str, Any]:
        shared = file.get("expert_shared_feed_forward_length")
        return {"num_experts": file.get("expert_count"), "num_experts_per_tok": file.get("expert_used_count"),
                "moe_intermediate_size": file.get("expert_feed_forward_length"), "norm_topk_prob": renormalizes,
                **({"shared_expert_intermediate_size": shared} if shared else {})}

    return values


def _mixtral(file: GgufFile) -> dict[str, Any]:
    return {"num_local_experts": file.get("expert_count"), "num_experts_per_tok": file.get("expert_used_count")}


def _gemma2(file: GgufFile) -> dict[str, Any]:
    """Scores are divided by the root of a head's size, or, in the model of 27B, of the hidden size's share of one."""
    scalar = file.get("attention.key_length", 256)
    if file.get("block_count") == _GEMMA2_27B_LAYERS:
        scalar = file.get("embedding_length") // file.get("attention.head_count")
    caps = {f"{name}_softcapping": file.get(f"{name}_softcapping") for name in ("attn_logit", "final_logit")}
    return {**caps, "query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh",
            "hidden_act": "gelu_pytorch_tanh", "sliding_window": file.get("attention.sliding_window", 4096)}


_GEMMA2_27B_LAYERS = 46
_GEMMA = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
          "post_ffw_norm": "post_feedforward_layernorm"}
FAMILIES = {
    "gemma2": GgufFamily("Gemma2ForCausalLM", "gemma2", _gemma2, added_to_norms=1.0, names=_GEMMA),
    "llama": GgufFamily("LlamaForCausalLM", "llama", _llama, pairs_heads=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GgufFamily("Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", "qwen2_moe", _experts(False)),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", "qwen3_moe", _experts(True)),
}
_MIXTRAL = GgufFamily("MixtralForCausalLM", "mixtral", _mixtral, pairs_heads=True)


def family_of(file: GgufFile) -> GgufFamily:
    """Returns a file's family; raises ConfigError for one that is not served."""
    if file.architecture == "llama" and file.get("expert_count"):
        return _MIXTRAL
    if file.architecture not in FAMILIES:
        raise ConfigError(f"GGUF files of {file.architecture or 'no architecture'} are not supported: use one of "
                          f"{', '.join(FAMILIES)}, or the checkpoint in safetensors.")
    return FAMILIES[file.architecture]
