"""Any causal model of transformers, computed by transformers' own code over Baton's attention and KV pool.

It serves ``--model-impl transformers``, whatever the architecture, and by default architectures that have no family.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..api.errors import ConfigError
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.scores import Scores
from ..config.server import ModelArgs
from ..config.window import Windows, window_of_all_layers, window_of_flagged_layers
from .registry import MODELS, ModelFamily

if TYPE_CHECKING:
    import torch

    from ..distributed.parallel import Parallel
    from .decoder.causal_lm import CausalLM

_OTHER_KEYS = frozenset((
    "architectures", "auto_map", "transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache",
    "bos_token_id", "eos_token_id", "output_attentions", "output_hidden_states", "return_dict",
    "problem_type", "chunk_size_feed_forward", "is_encoder_decoder", "quantization_config"))
"""Keys of a config.json that do not change what a model computes."""
_STATEFUL_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that transformers changes with the longest sequence of a batch."""


_ALIASES = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
            "n_inner": "intermediate_size", "n_positions": "max_position_embeddings"}
"""GPT-2's names of what other families' configurations have under the names on the right."""


@dataclass(frozen=True)
class TransformersSpec:
    """The keys of config.json by which transformers makes the model, with classes of the checkpoint's ``code`` where it
    ships them."""

    config: Mapping[str, Any]
    quantized_checkpoint: bool = False
    code: CheckpointCode | None = None


@dataclass(frozen=True)
class CheckpointCode:
    """Classes that a checkpoint's own files have, as its ``auto_map`` names them, in the folder or hub repository
    ``source``."""

    config_class: str
    model_class: str
    source: str
    revision: str | None


def has_model(architecture: str) -> bool:
    """Returns whether the transformers that is installed has a model of this name, whose attention can be replaced;
    reads its files, and does not import it, which would import torch."""
    found = importlib.util.find_spec("transformers")
    folders = [] if found is None else [Path(place) for place in found.submodule_search_locations or ()]
    wanted = f"class {architecture}(".encode()
    files = (path.read_bytes() for folder in folders for path in folder.glob("models/*/modeling_*.py"))
    return any(wanted in text and b"_supports_attention_backend = True" in text for text in files)


def read(config: ModelConfig) -> ModelSpec:
    given = config.values
    values = {**{own: given[name] for name, own in _ALIASES.items() if given.get(name) is not None}, **given}
    values.setdefault("intermediate_size", 4 * values["hidden_size"])
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    for of_layers in (part for part in rope.values() if isinstance(part, dict)):
        if (kind := of_layers.get("rope_type") or of_layers.get("type")) in _STATEFUL_ROPE:
            raise ConfigError(f"--model-impl transformers does not serve rotary embeddings of type {kind!r} in some "
                              "layers, which change with the length of the sequence.")
    if values.get("num_kv_shared_layers"):
        raise ConfigError("--model-impl transformers does not serve models whose layers share keys and values.")
    own = TransformersSpec({"model_type": values["model_type"],
                            **{key: value for key, value in given.items() if key not in _OTHER_KEYS}},
                           bool(given.get("quantization_config")), _code(config))
    scores = Scores(softcap=values.get("attn_logit_softcapping") or 0.0)
    return dataclasses.replace(config, values=values).spec(_longest(config.args, values, rope), own,
                                                           windows=_windows(values), scores=scores)


def _code(config: ModelConfig) -> CheckpointCode | None:
    """Returns the classes of the checkpoint's own code, where it may run and transformers has no such model."""
    stated: Mapping[str, str] = config.values.get("auto_map") or {}
    if not {"AutoConfig", "AutoModelForCausalLM"} <= stated.keys() or has_model(config.architecture):
        return None
    if not config.args.trust_remote_code:
        raise ConfigError(f"{config.architecture} is code that its checkpoint ships: give --trust-remote-code to run "
                          "it, if you trust the checkpoint as you trust a program, or use another checkpoint.")
    folder = Path(config.args.model_path).expanduser()
    return CheckpointCode(stated["AutoConfig"], stated["AutoModelForCausalLM"],
                          str(folder) if folder.is_dir() else config.args.model_path, config.args.revision)


def _longest(args: ModelArgs, values: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """Returns the longest context; dynamic NTK extends it where --context-length asks for that."""
    trained: int = values["max_position_embeddings"]
    if (rope.get("rope_type") or rope.get("type")) == "dynamic" and args.context_length is not None:
        return int(trained * rope["factor"])
    return trained


def _windows(values: Mapping[str, Any]) -> Windows:
    """Reads the windows; ``build`` refuses models whose own differ from these."""
    if values.get("layer_types"):
        return window_of_flagged_layers(values, [False] * values["num_hidden_layers"])
    return window_of_all_layers(values) if values.get("use_sliding_window", True) else ()


def build(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> CausalLM:
    from .transformers_code.model import TransformersModel

    own: TransformersSpec = spec.family
    # It has what a rank calls that captures no prompts and does not split steps.
    return cast("CausalLM", TransformersModel(spec, own, parallel, dtype, device))


MODELS.register("transformers", hidden=True)(ModelFamily(read, build=build, defaults={"tie_word_embeddings": True}))
