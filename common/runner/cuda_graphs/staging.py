"""Static inputs of captured steps: a device buffer that one copy fills, from host memory of the same layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

INITIAL_PINNED_INDICES = 1 << 20
"""``kv_indices`` that pinned memory is allocated for from the start: allocating it takes a millisecond."""

Layout = dict[str, tuple[int, int, type]]
"""``(byte offset, entries, dtype)`` of each array in a buffer."""


def layout_of(int64: Mapping[str, int], int32: Mapping[str, int]) -> tuple[Layout, int]:
    """Returns the layout of arrays with these numbers of entries, one after the other, and the bytes of all.

    Every array starts aligned: Triton compiles a kernel anew for pointers that are not 16-byte aligned.
    """
    layout: Layout = {}
    end = 0
    for dtype, arrays in ((np.int64, int64), (np.int32, int32)):
        for name, count in arrays.items():
            layout[name] = end, count, dtype
            end += -(count * np.dtype(dtype).itemsize // -16) * 16
    return layout, end


def tensors_of(memory: torch.Tensor, layout: Layout) -> dict[str, torch.Tensor]:
    """Returns the arrays of ``layout`` in ``memory`` (uint8)."""
    return {name: memory[begin:begin + count * np.dtype(dtype).itemsize].view(
        torch.int64 if dtype is np.int64 else torch.int32) for name, (begin, count, dtype) in layout.items()}


class Pages(NamedTuple):
    """A version of a step's pages, padded to ``size`` requests."""

    version: int | None
    size: int

    def same(self, other: Pages | None) -> bool:
        return self.version is not None and self == other


class StagingBuffer:
    """A host buffer with the arrays of ``layout`` and behind them ``kv_indices``, pinned where there is a GPU."""

    def __init__(self, indices_offset: int, layout: Layout, num_indices: int, device: torch.device):
        """``num_indices`` entries of ``kv_indices`` fit without a further allocation."""
        self._indices_offset = indices_offset
        self._layout = layout
        self._pinned = device.type == "cuda"
        self._copied = torch.cuda.Event() if self._pinned else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._arrays: dict[str, np.ndarray] = {}
        self._used = 0
        self._slices = self._memory, self._memory
        self.pages: Pages | None = None  # those in the buffer
        self._allocate(num_indices)

    def acquire(self, num_indices: int) -> dict[str, np.ndarray]:
        """Returns the arrays to write, with ``num_indices`` entries in ``kv_indices``; waits for the copy before."""
        if self._copied is not None:
            self._copied.synchronize()
        if num_indices > self._capacity:
            self._allocate(2 * num_indices)
        return self._arrays

    def _allocate(self, num_indices: int) -> None:
        self._capacity = num_indices
        self._memory = torch.zeros(self._indices_offset + 4 * num_indices, dtype=torch.uint8, pin_memory=self._pinned)
        self._used, self.pages = 0, None
        memory = self._memory.numpy()
        self._arrays = {name: memory[begin:begin + count * np.dtype(dtype).itemsize].view(dtype)
                        for name, (begin, count, dtype) in self._layout.items()}
        self._arrays["kv_indices"] = memory[self._indices_offset:].view(np.int32)

    def copy_to(self, target: torch.Tensor, used: int) -> None:
        """Starts to copy the first ``used`` bytes to ``target``."""
        if used != self._used:  # a slice costs microseconds
            self._used, self._slices = used, (target[:used], self._memory[:used])
        device, host = self._slices
        device.copy_(host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class StaticInputs:
    """Arrays on the device at fixed addresses, ``tensors`` by name; ``kv_indices`` come last, as their number varies.
    They are written on the host, in one of two buffers, while the copy of the other may be in flight.

    ``int64`` and ``int32`` have the entries of the arrays by name; ``kv_indices`` has ``max_indices``, which are
    ``scratch_page`` at first.
    """

    def __init__(self, int64: Mapping[str, int], int32: Mapping[str, int], max_indices: int, scratch_page: int,
                 device: torch.device):
        layout, self._indices_offset = layout_of(int64, int32)
        self._bytes = torch.zeros(self._indices_offset + 4 * max_indices, dtype=torch.uint8, device=device)
        self.tensors = tensors_of(self._bytes, layout)
        self.tensors["kv_indices"] = self._bytes[self._indices_offset:].view(torch.int32)
        self.tensors["kv_indices"].fill_(scratch_page)
        self._staging = [StagingBuffer(self._indices_offset, layout, min(max_indices, INITIAL_PINNED_INDICES), device)
                         for _ in range(2)]
        self._active = 0
        self._pages: Pages | None = None  # those of ``tensors``, once the copies in flight have run

    def begin(self, pages: Pages, num_indices: int) -> tuple[dict[str, np.ndarray], bool]:
        """Returns the arrays to write, with ``num_indices`` entries in ``kv_indices``, and whether those of ``pages``
        are to be written too: they may be there from before."""
        self._active ^= 1
        staging = self._staging[self._active]
        arrays = staging.acquire(num_indices)
        known = pages.same(staging.pages)
        staging.pages = pages
        return arrays, not known

    def copy(self, pages: Pages, num_indices: int) -> None:
        """Starts to copy what was written, without the ``num_indices`` that the device has already. A step that was
        launched reads the values from before."""
        used = self._indices_offset + 4 * num_indices
        assert used <= len(self._bytes), "more pages than a captured step may have"
        self._staging[self._active].copy_to(self._bytes, self._indices_offset if pages.same(self._pages) else used)
        self._pages = pages
