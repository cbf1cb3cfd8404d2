"""Static inputs of decode graphs: one device buffer, which one copy fills."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...forward.forward_batch import NO_COLUMNS, BatchColumns

_INT64 = ("positions", "page_of_token", "offset_in_page")
_INT32 = ("kv_indptr", "kv_last_page_len")
_INITIAL_PINNED_INDICES = 1 << 20
"""``kv_indices`` that pinned memory is allocated for from the start: allocating it takes a millisecond."""

_Layout = dict[str, tuple[int, int, type]]
"""``(byte offset, entries, dtype)`` of each array in the buffer."""


class DecodeInputs:
    """The arrays of BatchColumns on the device, at fixed addresses: ``tensors`` by name, for ``max_rows`` rows.

    They are initialised as padding rows, which read and write the page ``scratch_page``. ``kv_indices`` has
    ``max_indices`` entries.
    """

    def __init__(self, max_rows: int, max_indices: int, scratch_page: int, device: torch.device):
        self._scratch_page = scratch_page
        self._device = device
        self._layout: _Layout = {}
        end = 0
        # Triton compiles a kernel anew for pointers that are not 16-byte aligned, so every array starts aligned.
        for name in (*_INT64, *_INT32):
            dtype = np.int64 if name in _INT64 else np.int32
            count = max_rows + (name == "kv_indptr")
            self._layout[name] = end, count, dtype
            end += -(count * np.dtype(dtype).itemsize // -16) * 16
        self._indices_offset = end  # kv_indices come last: their number varies
        self._bytes = torch.empty(end + 4 * max_indices, dtype=torch.uint8, device=device)
        self.tensors = {name: self._bytes[begin:begin + count * np.dtype(dtype).itemsize].view(
            torch.int64 if dtype is np.int64 else torch.int32) for name, (begin, count, dtype) in self._layout.items()}
        self.tensors["kv_indices"] = self._bytes[end:].view(torch.int32)
        self._staging = [_StagingBuffer(self._indices_offset, self._layout,
                                        min(max_indices, _INITIAL_PINNED_INDICES), device) for _ in range(2)]
        self._active = 0
        self._pages: _Pages | None = None  # those of ``tensors``, once the copies in flight have run
        self.tensors["kv_indices"].fill_(scratch_page)
        self.fill(NO_COLUMNS, max_rows)

    def fill(self, columns: BatchColumns, size: int) -> dict[str, np.ndarray]:
        """Copies ``columns``, padded to ``size`` rows, to the device without waiting for it; returns host copies, which
        the second call after this one overwrites. A step that was launched reads the values from before.

        Pages of the same ``pages_version`` are not copied again.
        """
        self._active ^= 1
        count, num_indices = len(columns.positions), len(columns.kv_indices)
        staging = self._staging[self._active]
        arrays = staging.acquire(num_indices + size - count)
        for name in (*_INT64, "kv_last_page_len"):
            arrays[name][:count] = getattr(columns, name)
        pages = _Pages(columns.pages_version, size)
        if not pages.same(staging.pages):
            staging.pages = pages
            self._fill_pages(arrays, columns, size)
        used = self._indices_offset + 4 * (num_indices + size - count)
        assert used <= len(self._bytes), "more pages than a captured step may have"
        staging.copy_to(self._bytes, self._indices_offset if pages.same(self._pages) else used)
        self._pages = pages
        return {"kv_indptr": arrays["kv_indptr"][:size + 1], "kv_last_page_len": arrays["kv_last_page_len"][:size],
                "kv_indices": arrays["kv_indices"][:num_indices + size - count]}

    def _fill_pages(self, arrays: dict[str, np.ndarray], columns: BatchColumns, size: int) -> None:
        """Writes what stays the same until a request gets a new page, including padding rows."""
        count, num_indices = len(columns.positions), len(columns.kv_indices)
        arrays["kv_indptr"][:count + 1] = columns.kv_indptr
        arrays["kv_indices"][:num_indices] = columns.kv_indices
        arrays["positions"][count:size] = 0
        arrays["page_of_token"][count:size] = self._scratch_page
        arrays["offset_in_page"][count:size] = 0
        arrays["kv_last_page_len"][count:size] = 1
        arrays["kv_indptr"][count + 1:size + 1] = np.arange(num_indices + 1, num_indices + size - count + 1)
        arrays["kv_indices"][num_indices:num_indices + size - count] = self._scratch_page


class _Pages(NamedTuple):
    """A version of a step's pages, padded to ``size`` rows."""

    version: int | None
    size: int

    def same(self, other: _Pages | None) -> bool:
        return self.version is not None and self == other


class _StagingBuffer:
    """A host buffer of the same layout, pinned where there is a GPU."""

    def __init__(self, indices_offset: int, layout: _Layout, num_indices: int, device: torch.device):
        """``num_indices`` entries of ``kv_indices`` fit without a further allocation."""
        self._indices_offset = indices_offset
        self._layout = layout
        self._pinned = device.type == "cuda"
        self._copied = torch.cuda.Event() if self._pinned else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._arrays: dict[str, np.ndarray] = {}
        self._used = 0
        self._slices = self._memory, self._memory
        self.pages: _Pages | None = None  # those in the buffer
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
        self._memory = torch.empty(self._indices_offset + 4 * num_indices, dtype=torch.uint8, pin_memory=self._pinned)
        self._used, self.pages = 0, None
        memory = self._memory.numpy()
        self._arrays = {name: memory[begin:begin + count * np.dtype(dtype).itemsize].view(dtype)
                        for name, (begin, count, dtype) in self._layout.items()}
        self._arrays["kv_indices"] = memory[self._indices_offset:].view(np.int32)

    def copy_to(self, target: torch.Tensor, used: int) -> None:
        if used != self._used:  # a slice costs microseconds
            self._used, self._slices = used, (target[:used], self._memory[:used])
        device, host = self._slices
        device.copy_(host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
