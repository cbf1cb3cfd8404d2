"""Sources of a model's weights. One source a file, registered there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from ..api.errors import ConfigError
from ..config.checkpoint import read_config
from ..config.load_format import LOAD_FORMATS
from ..config.quantization import Unpack, unpacking
from ..config.server import ModelArgs
from .lazy import LazyTensor
from .slots import Slot


class SourceTensor(NamedTuple):
    """A tensor that ``name``s its parameter as Hugging Face's checkpoints do; ``file`` is its origin, for errors."""

    name: str
    tensor: LazyTensor
    file: str


class WeightSource(Protocol):
    """The weights of one model. Tensors are read when they are sliced, on the rank that needs the slice."""

    @property
    def name(self) -> str:
        """The name of these weights, for logs and errors: a folder, or a noun."""

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        """Yields all tensors, whichever ``slots`` there are; or, where weights are made up, one for each of them.
        Raises ConfigError where they cannot be read."""

    def find(self, name: str) -> LazyTensor:
        """Returns one of the tensors; raises ConfigError where there is none of this name."""

    def identity(self, is_optional: Callable[[str], bool]) -> bytes:
        """Returns bytes that are equal for equal weights on any server, and different for others; tensors whose names
        are optional do not count."""


def find_among(source: WeightSource, name: str) -> LazyTensor:
    """Returns the first of a source's tensors with this name, as its ``find`` may; raises ConfigError without one."""
    for found, tensor, _ in source.tensors(()):
        if found == name:
            return tensor
    raise lacks(source, name)


def lacks(source: WeightSource, name: str) -> ConfigError:
    """Returns the error of a checkpoint without a tensor that another one of it needs."""
    return ConfigError(f"The checkpoint {source.name} lacks {name}: use a complete one.")


def open_weights(args: ModelArgs) -> WeightSource:
    """Opens the weights that ``args`` name; those of a packed checkpoint are unpacked. Raises ConfigError."""
    source = LOAD_FORMATS.get(args.load_format)(args)
    unpack = unpacking(read_config(args) or {}, args.quantization)
    return source if unpack is None else _UnpackedSource(source, unpack)


class _UnpackedSource:
    """Another source's tensors, converted by ``unpack``."""

    def __init__(self, source: WeightSource, unpack: Unpack):
        self._source, self._unpack = source, unpack
        self.name, self.find, self.identity = source.name, source.find, source.identity

    def tensors(self, slots: Sequence[Slot]) -> Iterator[SourceTensor]:
        for name, tensor, file in self._source.tensors(slots):
            for unpacked_name, unpacked in self._unpack(name, tensor, self.find):
                yield SourceTensor(unpacked_name, unpacked, file)
