"""Staging buffers: host memory of the layout of a device buffer, which one copy fills."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

Layout = dict[str, tuple[int, int, type]]
"""``(byte offset, entries, dtype)`` of each array in a buffer."""


def layout_of(int64: Mapping[str, int], int32: Mapping[str, int]) -> tuple[Layout, int]:
    """Returns the layout of arrays with so many entries, one after the other, and the bytes of all.

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
