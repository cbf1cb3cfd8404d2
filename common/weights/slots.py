"""Slots for a checkpoint's tensors: layers declare them, loaders fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from ..api.errors import ConfigError
from ..config.quantization import QuantFormat
from .lazy import LazyTensor

DUMMY_STD = 0.02
_QUANTIZED = {"F8_E4M3": "float8", "F8_E5M2": "float8", "I8": "int8", "U8": "uint8"}
"""Types of quantized values, by safetensors' names of them."""


@dataclass(frozen=True)
class TensorKind:
    """The kind of a tensor in the checkpoint, as a model's quantization format reads it.

    ``name`` completes "by config.json it is ...". ``dtype`` is safetensors' name of the only type that it may have,
    where there is one; the types ``refuses`` it must not have. Without ``keeps_ones`` it is written with and without
    dimensions of one. Dummy values are all ``dummy_value``, or, where that is None, normal with the deviation
    ``dummy_std``, and clamped to ``dummy_limit``; ``dummy`` makes those of a shape that are none of this.
    """

    name: str
    dtype: str | None = None
    refuses: tuple[str, ...] = ()
    keeps_ones: bool = True
    dummy_value: float | None = None
    dummy_std: float = DUMMY_STD
    dummy_limit: float | None = None
    dummy: Callable[[tuple[int, ...], torch.Generator], torch.Tensor] | None = None

    def check(self, name: str, tensor: LazyTensor, shape: tuple[int, ...], file: str) -> None:
        """Raises ConfigError where the tensor ``name`` in ``file`` is not of this kind, or not of ``shape``."""
        found = tuple(tensor.get_shape())
        same = found == shape if self.keeps_ones else [n for n in found if n != 1] == [n for n in shape if n != 1]
        if not same:
            raise ConfigError(f"{name} in {file} has shape {list(found)}, but config.json asks for {list(shape)}.")
        dtype = tensor.get_dtype()
        if dtype in self.refuses or self.dtype not in (None, dtype):
            shown = _QUANTIZED.get(dtype, dtype) if dtype in self.refuses else dtype
            raise ConfigError(f"{name} in {file} is {shown}, but by config.json it is {self.name}.")


VALUES = TensorKind("not quantized", refuses=tuple(_QUANTIZED))
"""Values in a floating-point type, which are converted to the parameter's."""


def _random_bytes(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randint(256, shape, generator=generator, device=generator.device).to(torch.uint8)


PAIRS = TensorKind("two values of 4 bits a byte", "U8", dummy=_random_bytes)


class SharedMemory(Protocol):
    """Memory of a layer's parameters that other layers' use too, see offload. It is hashable."""

    def bring(self) -> None:
        """Brings the layer's parameters there, to be read and written."""

    def write_back(self) -> None:
        """Stores what was written, of all layers that use the memory."""

    def content_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns what a parameter holds, in host memory."""


@dataclass(frozen=True)
class Slot:
    """The destination of a checkpoint tensor, or of a slice of it.

    ``target``, a part of a parameter, is filled with the slice ``[start : start + target.shape[dim]]`` along ``dim`` of
    the tensor ``name``, whose whole shape is ``shape`` (``()``: one value, for all of ``target``). With an empty
    ``target`` the checkpoint must have the tensor, which another rank loads.

    ``kind`` says how the checkpoint's tensor is checked, and a dummy one made. ``load``, where given, gets the slice
    instead of a copy to ``target``. ``finish``, where given, is called after all slots have been filled, once for those
    that share it: a format repacks its parameters there.

    ``size``, where given, is the slice's length along ``dim`` in place of the target's, for a ``load`` that converts
    it. A checkpoint may lack a tensor that is ``optional``.

    ``memory``: that of the target, where other layers use it too. Then the target has its content between ``bring`` and
    ``write_back`` alone; ``fill`` and ``finish_loading`` see to it.
    """

    name: str
    target: torch.Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    kind: TensorKind = VALUES
    load: Callable[[torch.Tensor], object] | None = None
    finish: Callable[[], object] | None = None
    memory: SharedMemory | None = None
    size: int | None = None
    optional: bool = False

    def fill(self, source: LazyTensor | torch.Tensor) -> None:
        """Fills the target with its slice of ``source``, of any device. ``finish_loading`` ends the loading of slots;
        no step may run between."""
        if self.target.numel():
            self.write(self.part_of(source))

    def write(self, part: torch.Tensor) -> None:
        """Fills the target with its slice; see ``fill``."""
        if self.memory is not None:
            self.memory.bring()
        if self.load is None:
            self.target.copy_(part)
        else:
            self.load(part)

    def part_of(self, source: LazyTensor | torch.Tensor) -> torch.Tensor:
        """Returns the slot's slice of ``source``."""
        if not self.shape:
            whole: torch.Tensor = source[...]
            return whole
        stop = self.start + (self.target.shape[self.dim] if self.size is None else self.size)
        result: torch.Tensor = source[self.start:stop] if self.dim == 0 else source[:, self.start:stop]
        return result

    def content(self) -> torch.Tensor:
        """Returns what the target holds: itself, or a copy in host memory."""
        return self.target if self.memory is None else self.memory.content_of(self.target)


def finish_loading(slots: Iterable[Slot]) -> None:
    """Calls what slots ``finish`` with, each function once, and ends their loading."""
    slots = list(slots)
    try:
        for finish, memory in dict.fromkeys((slot.finish, slot.memory) for slot in slots):
            if finish is not None:
                if memory is not None:
                    memory.bring()
                finish()
    finally:
        end_loading(slots)


def end_loading(slots: Iterable[Slot]) -> None:
    """Ends the loading of slots without finishing it, after an error."""
    for memory in dict.fromkeys(slot.memory for slot in slots):
        if memory is not None:
            memory.write_back()


class AllocateMemory(Protocol):
    """Allocates an uninitialised parameter."""

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class Allocate:
    """Allocates uninitialised parameters on ``device``, of type ``dtype`` unless a call names another; linear layers
    are in the format ``quantization`` where there is one. ``memory`` is where parameters are placed, by default memory
    of their own."""

    dtype: torch.dtype
    device: torch.device
    quantization: QuantFormat | None = None
    memory: AllocateMemory | None = None

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if self.memory is not None:
            return self.memory(shape, dtype or self.dtype)
        return torch.empty(*shape, dtype=dtype or self.dtype, device=self.device)


def allocator(dtype: torch.dtype, device: torch.device, quantization: QuantFormat | None = None) -> Allocate:
    return Allocate(dtype, device, quantization)
