"""Any causal model of transformers, computed by transformers' own code over Baton's attention and KV pool.

It serves ``--model-impl transformers``, whatever the architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ..api.errors import ConfigError
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.window import Windows, window_of_all_layers, window_of_flagged_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    import torch

    from ..distributed.parallel import Parallel
    from .decoder.causal_lm import CausalLM

_OTHER_KEYS = frozenset((
    "architectures", "auto_map", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache",
    "bos_token_id", "eos_token_id", "output_attentions", "output_hidden_states", "return_dict",
    "id2label", "label2id", "problem_type", "chunk_size_feed_forward", "is_encoder_decoder"))
"""Keys of a config.json that do not change what a model computes."""
_STATEFUL_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that transformers changes with the longest sequence of a batch, which a KV cache cannot follow."""


@dataclass(frozen=True)
class TransformersSpec:
    """The keys of config.json by which transformers makes the model."""

    config: Mapping[str, Any]


def read(config: ModelConfig) -> ModelSpec:
    values = config.values
    if not config.architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise ConfigError(f"--model-impl transformers serves causal language models, which {config.architecture} is "
                          "not.")
    if values.get("quantization_config"):
        raise ConfigError("--model-impl transformers does not read quantized checkpoints: use one in bfloat16, float16 "
                          "or float32.")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if (kind := rope.get("rope_type") or rope.get("type")) in _STATEFUL_ROPE:
        raise ConfigError(f"--model-impl transformers does not serve rotary embeddings of type {kind!r}, which change "
                          "with the length of the sequence.")
    if values.get("num_kv_shared_layers"):
        raise ConfigError("--model-impl transformers does not serve models whose layers share keys and values.")
    own = TransformersSpec({"model_type": values["model_type"],
                            **{key: value for key, value in values.items() if key not in _OTHER_KEYS}})
    return config.spec(values["max_position_embeddings"], own, windows=_windows(values))


def _windows(values: Mapping[str, Any]) -> Windows:
    """Reads the windows; ``build`` refuses models whose own differ from these."""
    if values.get("layer_types"):
        return window_of_flagged_layers(values, [False] * values["num_hidden_layers"])
    return window_of_all_layers(values) if values.get("use_sliding_window", True) else ()


def build(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> CausalLM:
    from .decoder.transformers_model import TransformersModel

    # It has what a rank calls that captures no graphs and does not split steps.
    return cast("CausalLM", TransformersModel(spec, spec.family.config, parallel, dtype, device))


MODELS.register("transformers", hidden=True)(ModelFamily(read, build, defaults={"tie_word_embeddings": True}))
