"""Quantization formats: their registry, and the choice of one by the checkpoint's ``quantization_config`` or by
``--quantization``.

It imports no torch, nor do the files of the formats at their top: the API server reads a checkpoint's configuration,
too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ..api.errors import ConfigError
from ..registry import Registry

if TYPE_CHECKING:
    import torch

    from ...kernels.gated_activation import GateActivation
    from ..quantization.experts import ExpertStack, GroupedExperts
    from ..quantization.methods import LinearMethod
    from ..quantization.shards import Shard
    from ..weights.lazy import LazyTensor
    from ..weights.slots import Allocate

E = TypeVar("E")


class QuantFormat(Protocol):
    """The format of a model's linear layers, or the several formats that its layers have: a frozen dataclass of what
    one checkpoint or one value of ``--quantization`` says. Equal formats take each other's checkpoints.

    A format may have ``flags``, values of ``--quantization`` that say of a checkpoint that it is in this format. Those
    that its QuantMethod reads (``methods``) always do."""

    def for_layer(self, name: str) -> LayerFormat | None:
        """Returns the format of the linear layer with this name in the checkpoint, None where it is not quantized. The
        embedding and the output head never are."""

    def check_device(self, dtype: str, device: torch.device) -> None:
        """Raises ConfigError where ``device`` cannot compute with such weights in ``dtype``."""


class LayerFormat(Protocol):
    """Storage of one linear layer's weight and computation with it, once it is loaded. Equal formats can be fused."""

    def check_device(self, dtype: str, device: torch.device) -> None:
        """Raises ConfigError where ``device`` cannot compute with such weights in ``dtype``."""

    def linear(self, shards: Sequence[Shard], width: int, allocate: Allocate) -> LinearMethod:
        """Creates the method of a weight ``[sum of the shards' sizes, width]``; raises ConfigError where the format
        does not allow such shards."""

    def experts(self, gate_up: ExpertStack, down: ExpertStack, limit: float,
                activate: GateActivation | None = None) -> GroupedExperts:
        """Creates the computation of a rank's experts, whose linear methods are in this format. A ``limit`` clamps gate
        and up, 0 for a plain silu, and ``activate`` takes silu's place. Raises ConfigError where experts cannot be
        computed so."""


@dataclass(frozen=True)
class MixedFormats:
    """Several formats in one checkpoint: a layer has that of the first rule which names it, and none where no rule
    does. A rule's patterns are those of ``names_layer``; an empty pattern names every layer."""

    rules: tuple[tuple[tuple[str, ...], LayerFormat | None], ...]

    @property
    def flags(self) -> tuple[str, ...]:
        """Those that all formats have."""
        found = [set[str](getattr(layer, "flags", ())) for _, layer in self.rules if layer is not None]
        return tuple(sorted(set.intersection(*found))) if found else ()

    def for_layer(self, name: str) -> LayerFormat | None:
        return next((layer for patterns, layer in self.rules if "" in patterns or names_layer(patterns, name)), None)

    def check_device(self, dtype: str, device: torch.device) -> None:
        for _, layer in self.rules:
            if layer is not None:
                layer.check_device(dtype, device)


Unpack = Callable[[str, "LazyTensor", Callable[[str], "LazyTensor"]], Iterator[tuple[str, "LazyTensor"]]]
"""``unpack(name, tensor, find)`` yields a tensor of the checkpoint, or those that it is converted to, with their names;
``find`` returns another tensor of the checkpoint."""


@dataclass(frozen=True)
class Packed:
    """A checkpoint's format that ends with loading: ``unpack`` converts its tensors, and weights run as those of a
    checkpoint that is not quantized.

    With ``kept`` the weights stay in that format unless ``--quantization`` asks for another, and ``split`` only yields
    the tensors by the names that its layers have."""

    unpack: Unpack
    kept: QuantFormat | None = None
    split: Unpack | None = None


class QuantMethod(Protocol):
    """A registered quantization format, as a rule the class of a QuantFormat. ``methods`` are the values of a
    checkpoint's ``quant_method`` that it reads."""

    @property
    def methods(self) -> tuple[str, ...]: ...

    def from_config(self, stated: Mapping[str, Any]) -> QuantFormat | Packed | None:
        """Reads the format of a checkpoint from its ``quantization_config``; None where another format with the same
        ``quant_method`` may read it. Raises ConfigError for a variant that is not supported, which it names."""

    def at_load(self, name: str) -> QuantFormat:
        """Returns the format in which weights that are not quantized are loaded with ``--quantization name``; raises
        ConfigError where they cannot be."""


@dataclass(frozen=True)
class CompressedGroup:
    """One of the ``config_groups`` of a checkpoint of compressed-tensors: how ``weights`` and, where they are quantized
    too, ``inputs`` are quantized, and the ``storage`` of the weights (``format``: "pack-quantized", ...)."""

    weights: Mapping[str, Any]
    inputs: Mapping[str, Any] | None
    storage: str

    @property
    def description(self) -> str:
        """Says in a few words what is quantized, for errors."""
        def describe(side: Mapping[str, Any] | None) -> str:
            return f"{side.get('num_bits')}-bit {side.get('type')}" if side else "not quantized"
        return f"weights are {describe(self.weights)} and input_activations {describe(self.inputs)}"


GroupReader = Callable[[CompressedGroup], "LayerFormat | None"]
"""Reads the format of a group's layers; None where another reader may know it. Raises ConfigError for a variant that is
not supported, which it names."""

COMPRESSED_GROUPS: Registry[GroupReader] = Registry("scheme of compressed-tensors", "baton.common.quantization")
"""Readers of the groups of compressed-tensors, one a kind of scheme, each in its format's file."""

QUANTIZATIONS: Registry[QuantMethod] = Registry("quantization format", "baton.common.quantization",
                                                group="baton.quantization")
"""The formats, by the values of ``--quantization``."""


def register_quantization(*names: str) -> Callable[[E], E]:
    """Returns a decorator that registers a QuantMethod under values of ``--quantization``. Servers find those of
    installed packages by entry points of the group ``baton.quantization`` with the same names."""
    return QUANTIZATIONS.register(*names)


def not_at_load(name: str, checkpoints: str, instead: str) -> ConfigError:
    """Returns the error of ``at_load`` of a format in which no weights are made; ``checkpoints`` says which ones it
    reads ("of AWQ"), ``instead`` names a format of weights made at load."""
    return ConfigError(f"--quantization {name} is for checkpoints {checkpoints}, and this one is not: leave the flag "
                       f"out; --quantization {instead} quantizes weights as they are loaded.")


def choose_quantization(config: Mapping[str, Any], flag: str | None) -> QuantFormat | None:
    """Returns the format of a model by its config.json and ``--quantization``; None where it is not quantized. Raises
    ConfigError for a format that is not supported."""
    stated = _stated(config)
    stored, methods = _read(stated) if stated else (None, ())
    if stored is not None and flag in (None, *methods, *getattr(stored, "flags", ())):
        return stored.kept if isinstance(stored, Packed) else stored
    if stored is not None and not isinstance(stored, Packed):
        assert flag is not None
        QUANTIZATIONS.get(flag).at_load(flag)  # formats of checkpoints alone say so
        raise ConfigError(f"--quantization {flag} is for checkpoints that are not quantized, and this one is: leave "
                          "the flag out.")
    return None if flag is None else QUANTIZATIONS.get(flag).at_load(flag)


def unpacking(config: Mapping[str, Any], flag: str | None) -> Unpack | None:
    """Returns the conversion of a checkpoint's tensors while they are loaded with ``--quantization flag``; None where
    there is none. Raises ConfigError as ``choose_quantization`` does."""
    stated = _stated(config)
    stored, methods = _read(stated) if stated else (None, ())
    if not isinstance(stored, Packed):
        return None
    return stored.split if stored.kept is not None and flag in (None, *methods) else stored.unpack


def _stated(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return config.get("quantization_config") or config.get("compression_config")


def _read(stated: Mapping[str, Any]) -> tuple[QuantFormat | Packed, tuple[str, ...]]:
    """Returns a checkpoint's format, and the values of ``quant_method`` that the method which read it reads."""
    method, refusal = stated.get("quant_method"), None
    methods: set[str] = set()
    for entry in _entries():
        methods.update(entry.methods)
        try:
            found = entry.from_config(stated) if method in entry.methods else None
        except ConfigError as error:
            refusal = refusal or error
            continue
        if found is not None:
            return found, entry.methods
    *names, last = sorted(methods)
    raise refusal or ConfigError(
        f"Checkpoints quantized by {method!r} are not supported: use one in bfloat16, float16 or float32, or one "
        f"quantized by {', '.join(names)} or {last}.")


def _entries() -> Iterator[QuantMethod]:
    """Yields the registered formats, our own first: plug-ins, which may import torch, are loaded where none of ours
    reads a checkpoint."""
    seen: set[int] = set()
    for name in sorted(QUANTIZATIONS.all_names, key=lambda name: (QUANTIZATIONS.module_of(name) is None, name)):
        entry = QUANTIZATIONS.get(name)
        if id(entry) not in seen:
            seen.add(id(entry))
            yield entry


def names_layer(patterns: Iterable[str], name: str) -> bool:
    """Returns whether one of a checkpoint's patterns matches a layer's name: by a regular expression after ``re:``,
    else by some of its dotted parts (``lm_head``, ``model.layers.0``)."""
    return any(re.match(pattern[3:], name) is not None if pattern.startswith("re:") else f".{pattern}." in f".{name}."
               for pattern in patterns)
