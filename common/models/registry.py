"""The registry of model families: each file beside this one is a family, and registers its architectures.

A family's file imports without torch: the API server reads specifications, and only ``build`` imports layers.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..config.checkpoint import read_json, resolve_metadata
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.server import ModelArgs

if TYPE_CHECKING:
    import torch

    from ..distributed.parallel import Parallel
    from .decoder.causal_lm import CausalLM
    from .decoder.mtp import MTPDraftLayer

    Build = Callable[[ModelSpec, Parallel, torch.dtype, torch.device], CausalLM]
    BuildDraft = Callable[[ModelSpec, Parallel, torch.dtype, torch.device], list[MTPDraftLayer]]

ENTRY_POINTS = "baton.models"
"""The group of entry points by which installed packages register families: a module, or a function to call."""

_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")


@dataclass(frozen=True)
class ModelFamily:
    """How checkpoints of some architectures are read and built; see ``register_model``."""

    read: Callable[[ModelConfig], ModelSpec]
    build: Build
    build_draft: BuildDraft | None
    defaults: Mapping[str, Any]


_FAMILIES: dict[str, ModelFamily] = {}


def register_model(*architectures: str, read: Callable[[ModelConfig], ModelSpec], build: Build,
                   build_draft: BuildDraft | None = None, defaults: Mapping[str, Any] | None = None) -> None:
    """Registers a family under the names that ``architectures`` of a config.json may have.

    ``read(config)`` reads a checkpoint's configuration, which ``defaults`` complete, and must not import torch.
    ``build(spec, parallel, dtype, device)`` makes the model of one rank, with uninitialised weights, and
    ``build_draft`` the draft layers of ``spec.mtp_layers``. Raises ConfigError for a name that is taken.
    """
    family = ModelFamily(read, build, build_draft, defaults or {})
    for name in architectures:
        known = _FAMILIES.setdefault(name, family)
        if known != family:
            raise ConfigError(f"Architecture {name} is registered by both {_module_of(known)} and "
                              f"{_module_of(family)}: register one of them under another name.")


def _module_of(family: ModelFamily) -> str:
    """Returns the module that reads a family's configuration."""
    return str(getattr(family.read, "func", family.read).__module__)  # a partial has its function's


def architectures_of(name: str) -> tuple[str, ...]:
    """Returns transformers' architecture names of the family ``name``, one for each head that is served."""
    return tuple(name + head for head in ("ForCausalLM", "ForSequenceClassification", "Model"))


@functools.cache
def families() -> Mapping[str, ModelFamily]:
    """Returns the registered families by architecture, after loading this folder's files and all plug-ins; raises
    ConfigError for a plug-in that cannot be loaded."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not module.ispkg:
            importlib.import_module(f"{__package__}.{module.name}")
    for point in entry_points(group=ENTRY_POINTS):
        _load(point)
    return _FAMILIES


def _load(point: EntryPoint) -> None:
    try:
        found = point.load()
        if callable(found):
            found()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"The model plug-in {point.name} = {point.value} cannot be loaded ({error!r}): mend or "
                          "uninstall its package.") from error


def load_model_spec(args: ModelArgs) -> ModelSpec:
    """Reads ``config.json`` and ``generation_config.json``; raises ConfigError, naming what is unsupported."""
    folder = resolve_metadata(args)
    config = read_json(folder / "config.json")
    if config is None:
        raise ConfigError(f"{folder} has no config.json: it is not a Hugging Face checkpoint.")
    generation = read_json(folder / "generation_config.json")
    for name in _COUNTS:
        if name in config and (type(config[name]) is not int or config[name] < 1):
            raise ConfigError(f"{folder}/config.json says {name} {config[name]!r}: it must be an integer of 1 or more.")
    try:
        architecture = _architecture_of(config)
        family = families()[architecture]
        return family.read(ModelConfig.complete(architecture, config, generation, family.defaults, args))
    except KeyError as error:
        raise ConfigError(f"{folder}/config.json lacks {error.args[0]!r}.") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder}/config.json has a value of the wrong type ({error}).") from None


def _architecture_of(config: Mapping[str, Any]) -> str:
    named = config.get("architectures") or ["none"]
    found: str | None = next((name for name in named if name in families()), None)
    if found is None:
        raise ConfigError(f"Architecture {named[0]} is not supported: use a checkpoint of "
                          f"{', '.join(name for name in families() if name.endswith('ForCausalLM'))}.")
    return found


def build_model(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Builds the module of ``spec.architecture`` with uninitialised weights."""
    return families()[spec.architecture].build(spec, parallel, dtype, device)


def build_draft_layers(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype,
                       device: torch.device) -> list[MTPDraftLayer]:
    """Builds the checkpoint's draft layers, the first one next to the model, with uninitialised weights; raises
    ConfigError for a family that has none."""
    build_draft = families()[spec.architecture].build_draft
    if build_draft is None or not spec.mtp_layers:
        raise ConfigError(f"{spec.architecture} has no layers of multi-token prediction.")
    return build_draft(spec, parallel, dtype, device)
