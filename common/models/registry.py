"""The registry of model families: each other file of this folder is a family, and registers its architectures.

A family's file imports without torch: the API server reads specifications, and only ``blocks`` and ``build`` import
layers.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..api.errors import ConfigError
from ..config.checkpoint import read_config, read_json, resolve_metadata
from ..config.draft_model import flat_config
from ..config.model import ModelSpec
from ..config.model_config import ModelConfig
from ..config.server import ModelArgs
from ..registry import Registry

if TYPE_CHECKING:
    import torch

    from ..distributed.parallel import Parallel
    from ..weights.loader import TensorParts
    from .decoder.blocks import Blocks
    from .decoder.causal_lm import CausalLM

    Build = Callable[[ModelSpec, Parallel, torch.dtype, torch.device], CausalLM]
    MakeBlocks = Callable[[ModelSpec, Parallel], Blocks]


@dataclass(frozen=True)
class ModelFamily:
    """The reader of checkpoints of some architectures, and the parts of their models.

    ``read(config)`` reads a checkpoint's configuration, which ``defaults`` complete, and must not import torch.
    ``blocks(spec, parallel)`` makes the parts of the layers of a CausalLM, of which draft layers are made too; a family
    of other models has ``build(spec, parallel, dtype, device)`` instead, which makes the model of one rank, with
    uninitialised weights. ``tensor_parts(name, tensor)``, where checkpoints name or stack tensors in another way than
    the model, returns the model's tensors that one of a checkpoint's holds; ``tensor_parts_of(spec)`` makes that
    function, where it depends on the model's sizes. Models of an ``encoder`` family see whole sequences and generate
    nothing: they are served as with --is-embedding. ``title`` and ``notes`` are a row of the documents' table of
    families; families with one title share it.
    """

    read: Callable[[ModelConfig], ModelSpec]
    blocks: MakeBlocks | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    tensor_parts: TensorParts | None = None
    tensor_parts_of: Callable[[ModelSpec], TensorParts | None] | None = None
    title: str = ""
    notes: str = ""
    encoder: bool = False
    build: Build | None = None

    def parts_of(self, spec: ModelSpec) -> TensorParts | None:
        """Returns the ``tensor_parts`` for a model of this family."""
        return self.tensor_parts if self.tensor_parts_of is None else self.tensor_parts_of(spec)


MODELS: Registry[ModelFamily] = Registry("model architecture", "baton.common.models", group="baton.models")
"""The families by the names that ``architectures`` of a config.json may have."""

_DRAFT_AFFIX = re.compile(r"^Eagle3?(?=[A-Z])|(Eagle3?|NextN)$")
_COUNTS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")


def register_model(*architectures: str, read: Callable[[ModelConfig], ModelSpec], blocks: MakeBlocks | None = None,
                   build: Build | None = None, defaults: Mapping[str, Any] | None = None,
                   tensor_parts: TensorParts | None = None,
                   tensor_parts_of: Callable[[ModelSpec], TensorParts | None] | None = None) -> None:
    """Registers a family from user code; the arguments are ``ModelFamily``'s, of which ``blocks`` or ``build`` must be
    given. Raises ConfigError for a name that is taken."""
    if (blocks is None) == (build is None):
        raise ConfigError(f"register_model of {', '.join(architectures)}: give blocks, of which the model is made, or "
                          "build, which makes it.")
    MODELS.register(*architectures)(
        ModelFamily(read, blocks, defaults or {}, tensor_parts, tensor_parts_of, build=build))


def family_of(architecture: str) -> ModelFamily:
    """Returns the family of an architecture; raises ConfigError for a plug-in that does not load or register it."""
    family = MODELS.get(architecture)
    if not isinstance(family, ModelFamily):
        raise ConfigError(f"The plug-in of the model architecture {architecture} does not register it: its entry point "
                          "must name a ModelFamily, or a module that calls baton.register_model with this name.")
    return family


def load_model_spec(args: ModelArgs, *, draft: bool = False) -> ModelSpec:
    """Reads ``config.json`` and ``generation_config.json``; raises ConfigError, naming what is unsupported. A ``draft``
    has the architecture's name with "Eagle", "Eagle3" or "NextN" before or after it."""
    folder = resolve_metadata(args)
    config = read_config(args, folder)
    if config is None:
        raise ConfigError(f"{folder} has no config.json: it is not a Hugging Face checkpoint.")
    if draft:
        config = flat_config(config)
    generation = read_json(folder / "generation_config.json")
    for name in _COUNTS:
        if name in config and (type(config[name]) is not int or config[name] < 1):
            raise ConfigError(f"{folder}/config.json says {name} {config[name]!r}: it must be an integer of 1 or more.")
    try:
        if _is_for_transformers(config, args, draft):
            architecture = str((config.get("architectures") or ["none"])[0])
            spec = _read(MODELS.get("transformers"), architecture, config, generation, args)
            return dataclasses.replace(spec, implementation="transformers")
        architecture = _architecture_of(config, draft)
        return _read(family_of(architecture), architecture, config, generation, args)
    except KeyError as error:
        raise ConfigError(f"{folder}/config.json lacks {error.args[0]!r}.") from None
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder}/config.json has a value of the wrong type ({error}).") from None


def _read(family: ModelFamily, architecture: str, config: Mapping[str, Any], generation: Mapping[str, Any] | None,
          args: ModelArgs) -> ModelSpec:
    encoder = family.encoder or config.get("is_causal") is False
    if encoder:
        args = dataclasses.replace(args, is_embedding=True)
    spec = family.read(ModelConfig.complete(architecture, config, generation, family.defaults, args))
    if encoder and (spec.mla is not None or any(spec.windows)):
        raise ConfigError(f"{architecture} attends in both directions by its config.json (is_causal false), and has "
                          "sliding windows or latent attention: the two are not supported together.")
    return dataclasses.replace(spec, encoder=encoder, pooling="cls" if family.encoder else "last")


def _is_for_transformers(config: Mapping[str, Any], args: ModelArgs, draft: bool) -> bool:
    """Returns whether transformers computes the model: by the flag, or where no family does and transformers can."""
    from .transformers_impl import has_model

    named = config.get("architectures") or []
    if args.model_impl != "auto" or draft or any(name in MODELS for name in named):
        return args.model_impl == "transformers"
    return bool(named) and (has_model(str(named[0])) or "AutoModelForCausalLM" in (config.get("auto_map") or {}))


def _architecture_of(config: Mapping[str, Any], draft: bool) -> str:
    named = config.get("architectures") or ["none"]
    if draft:
        named = [_DRAFT_AFFIX.sub("", name) for name in named]
    found: str | None = next((name for name in named if name in MODELS), None)
    if found is None:
        raise ConfigError(f"Architecture {named[0]} is not supported: use one of docs/models.md's, or of another "
                          "model that transformers has.")
    return found


def build_model(spec: ModelSpec, parallel: Parallel, dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Builds the module of ``spec.architecture`` with uninitialised weights."""
    family = family_of(spec.implementation or spec.architecture)
    if family.build is not None:
        return family.build(spec, parallel, dtype, device)
    from .decoder.causal_lm import CausalLM

    assert family.blocks is not None
    return CausalLM(spec, parallel, dtype, device, family.blocks(spec, parallel))


def blocks_of(spec: ModelSpec, parallel: Parallel) -> Blocks:
    """Returns the blocks of a model's family; raises ConfigError for one that names none."""
    blocks = family_of(spec.implementation or spec.architecture).blocks
    if blocks is None:
        raise ConfigError(f"{spec.implementation or spec.architecture} has no draft layers: its family names no blocks "
                          "of which they could be made.")
    return blocks(spec, parallel)


def tensor_parts(spec: ModelSpec) -> TensorParts | None:
    """Returns the ``tensor_parts`` of a model's family."""
    return family_of(spec.implementation or spec.architecture).parts_of(spec)
