"""Offloading: the weights of some layers are kept in host memory, and pass through buffers on the device."""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch

from ...api.errors import ConfigError
from ...config.server.offload import OffloadArgs
from ...process import available_host_bytes
from ..slots import Allocate, Slot
from .copy_stream import copy_stream
from .layer_ring import LayerPass, LayerRing

log = logging.getLogger("baton.weights")

_ALIGNMENT = 512
"""Bytes to which parameters are aligned, as torch does: kernels were compiled for it."""
_GIB = 1 << 30
_RESIDENT = LayerPass()


@dataclasses.dataclass(frozen=True)
class OffloadedLayer:
    """The memory of one layer's parameters, which other layers use too: see Slot."""

    ring: LayerRing
    index: int

    def bring(self) -> None:
        self.ring.bring(self.index)

    def write_back(self) -> None:
        self.ring.write_back()

    def content_of(self, parameter: torch.Tensor) -> torch.Tensor:
        return self.ring.content_of(self.index, parameter)


class Layer(Protocol):
    def slots(self) -> Iterator[Slot]: ...


L = TypeVar("L", bound=Layer)


class LayerStack(Generic[L]):
    """Layers of a model, in order, of which those that ``args`` choose by their size are offloaded.

    ``make(index, allocate)`` builds one. Where layers are offloaded each is built once before, to learn its size: the
    device then holds one layer at a time. Raises ConfigError where host memory is lacking, or nothing would be saved.
    """

    def __init__(self, count: int, make: Callable[[int, Allocate], L], allocate: Allocate, args: OffloadArgs | None):
        self._ring: LayerRing | None = None
        self._offloaded: dict[int, OffloadedLayer] = {}
        self.layers: list[L] = []
        if args is None or not args.enabled:
            self.layers = [make(index, allocate) for index in range(count)]
            return
        sizes = [_size_of(make, index, allocate) for index in range(count)]
        chosen = args.choose(sizes)
        buffers = [torch.empty(max(sizes[i] for i in chosen), dtype=torch.uint8, device=allocate.device)
                   for _ in range(args.num_buffers)]
        sources = _host_memory([sizes[index] for index in chosen], pinned=allocate.device.type == "cuda")
        self._ring = ring = LayerRing(chosen, sources, buffers, copy_stream(allocate.device, len(buffers)))
        self._offloaded = {index: OffloadedLayer(ring, index) for index in chosen}
        for index in range(count):
            memory = _Arena(ring.buffer_of(index)) if index in self._offloaded else None
            self.layers.append(make(index, dataclasses.replace(allocate, memory=memory)))
        log.info("the weights of %d of %d layers, %.3g GiB, are in host memory, and pass through %d buffers of %.3g "
                 "GiB on the device", len(chosen), count, sum(map(len, sources)) / _GIB, len(buffers),
                 len(buffers[0]) / _GIB)

    def start(self) -> LayerPass:
        """Starts the passage of a step, whose end its ``with`` block is."""
        return _RESIDENT if self._ring is None else self._ring.start()

    def slots(self) -> Iterator[Slot]:
        """Yields the layers' slots, those of offloaded ones with their memory."""
        for index, layer in enumerate(self.layers):
            memory = self._offloaded.get(index)
            for slot in layer.slots():
                yield slot if memory is None else dataclasses.replace(slot, memory=memory)


class _Arena:
    """Places parameters one after another into ``buffer``, or, without one, on ``device`` to count their bytes."""

    def __init__(self, buffer: torch.Tensor | None, device: torch.device | None = None):
        self._buffer, self._device = buffer, device
        self.num_bytes = 0

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        begin, size = self.num_bytes, math.prod(shape) * dtype.itemsize
        self.num_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        if self._buffer is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        return self._buffer[begin:begin + size].view(dtype).view(shape)


def _size_of(make: Callable[[int, Allocate], object], index: int, allocate: Allocate) -> int:
    """Returns the bytes of a layer's parameters."""
    counting = _Arena(None, allocate.device)
    make(index, dataclasses.replace(allocate, memory=counting))
    return counting.num_bytes


def _host_memory(sizes: list[int], *, pinned: bool) -> list[torch.Tensor]:
    """Returns uint8 tensors of these sizes, pinned by CUDA's own call: torch's allocator rounds up to a power of two.
    Raises ConfigError where the host lacks the memory."""
    lower = "put fewer layers there with --cpu-offload-gb or --offload-num-in-group"
    total, available = sum(sizes), available_host_bytes()
    if total > available:
        raise ConfigError(f"Layers of {total / _GIB:.1f} GiB are to stay in host memory, and this host has "
                          f"{available / _GIB:.1f} GiB: {lower}, or use more ranks.")
    found = [torch.empty(size, dtype=torch.uint8) for size in sizes]
    for memory in found if pinned else ():
        cudart: Any = torch.cuda.cudart()
        if int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) != 0:
            raise ConfigError(f"{total / _GIB:.1f} GiB of host memory cannot be pinned: {lower}, or raise the limit of "
                              "locked memory.")
        weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return found
