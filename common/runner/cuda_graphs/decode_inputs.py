"""What captured decode steps read: one piece of device memory, which one copy fills."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from ...forward.forward_batch import NO_ROWS, DecodeTable

_INT64 = ("positions", "page_of_token", "offset_in_page")
_INT32 = ("kv_indptr", "kv_last_page_len")
_AT_ONCE = 1 << 20  # entries that pinned memory has room for from the start: asking for it takes a millisecond


class DecodeInputs:
    """A DecodeTable's arrays on the device, at places that do not change: ``tensors`` by name, for ``largest`` rows.

    They begin as those of padding rows, which read and write the page ``scratch``; ``kv_indices`` has ``entries``.
    """

    def __init__(self, largest: int, entries: int, scratch: int, device: torch.device):
        self._scratch = scratch
        self._device = device
        self._places: dict[str, tuple[int, int, type]] = {}
        end = 0
        # Triton compiles a kernel anew for pointers that are not 16-byte aligned, so every array starts aligned.
        for name in (*_INT64, *_INT32):
            dtype = np.int64 if name in _INT64 else np.int32
            count = largest + (name == "kv_indptr")
            self._places[name] = end, count, dtype
            end += -(count * np.dtype(dtype).itemsize // -16) * 16
        self._head = end  # kv_indices come last: how many there are differs
        self._bytes = torch.empty(end + 4 * entries, dtype=torch.uint8, device=device)
        self.tensors = {name: self._bytes[begin:begin + count * np.dtype(dtype).itemsize].view(
            torch.int64 if dtype is np.int64 else torch.int32) for name, (begin, count, dtype) in self._places.items()}
        self.tensors["kv_indices"] = self._bytes[end:].view(torch.int32)
        self._stages = [_Stage(self._head, self._places, min(entries, _AT_ONCE), device) for _ in range(2)]
        self._turn = 0
        self._pages: _Pages | None = None  # that ``tensors`` have, once the copies on their way have run
        self.tensors["kv_indices"].fill_(scratch)
        self.fill(NO_ROWS, largest)

    def fill(self, table: DecodeTable, size: int) -> dict[str, np.ndarray]:
        """Put ``table`` there, with padding up to ``size`` rows, without waiting for the device; returns host copies,
        which the second call after this one overwrites. A step that was launched reads what was there before.

        The table's ``kv_indptr`` and ``kv_indices`` are not changed in place: what was sent before stays.
        """
        self._turn ^= 1
        count, entries = len(table.positions), len(table.kv_indices)
        stage = self._stages[self._turn]
        arrays = stage.opened(entries + size - count)
        for name in (*_INT64, "kv_last_page_len"):
            arrays[name][:count] = getattr(table, name)
        pages = _Pages(table.kv_indptr, table.kv_indices, size)
        if not pages.same(stage.pages):
            stage.pages = pages
            self._fill_pages(arrays, table, size)
        used = self._head + 4 * (entries + size - count)
        assert used <= len(self._bytes), "more pages than a captured step may have"
        stage.send(self._bytes, self._head if pages.same(self._pages) else used)
        self._pages = pages
        return {"kv_indptr": arrays["kv_indptr"][:size + 1], "kv_last_page_len": arrays["kv_last_page_len"][:size],
                "kv_indices": arrays["kv_indices"][:entries + size - count]}

    def _fill_pages(self, arrays: dict[str, np.ndarray], table: DecodeTable, size: int) -> None:
        """What stays the same until a request comes to a new page; padding's rows among it."""
        count, entries = len(table.positions), len(table.kv_indices)
        arrays["kv_indptr"][:count + 1] = table.kv_indptr
        arrays["kv_indices"][:entries] = table.kv_indices
        arrays["positions"][count:size] = 0
        arrays["page_of_token"][count:size] = self._scratch
        arrays["offset_in_page"][count:size] = 0
        arrays["kv_last_page_len"][count:size] = 1
        arrays["kv_indptr"][count + 1:size + 1] = np.arange(entries + 1, entries + size - count + 1)
        arrays["kv_indices"][entries:entries + size - count] = self._scratch

    def overwritten(self) -> None:
        """Somebody else has written to ``tensors``."""
        self._pages = None


class _Pages(NamedTuple):
    """A table's pages, padded to ``size`` rows; they are known by the arrays that they came in."""

    kv_indptr: np.ndarray
    kv_indices: np.ndarray
    size: int

    def same(self, other: _Pages | None) -> bool:
        return (other is not None and self.kv_indices is other.kv_indices and self.kv_indptr is other.kv_indptr
                and self.size == other.size)


class _Stage:
    """Host memory of the same form, pinned where there is a GPU."""

    def __init__(self, head: int, places: dict[str, tuple[int, int, type]], entries: int, device: torch.device):
        """``entries`` of ``kv_indices`` need no further memory."""
        self._head = head
        self._places = places
        self._pinned = device.type == "cuda"
        self._sent = torch.cuda.Event() if self._pinned else None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._arrays: dict[str, np.ndarray] = {}
        self._used = 0
        self._slices = self._memory, self._memory
        self.pages: _Pages | None = None  # that stand here
        self._reserve(entries)

    def opened(self, entries: int) -> dict[str, np.ndarray]:
        """The arrays to write, ``kv_indices`` with room for ``entries``, once the copy before has run."""
        if self._sent is not None:
            self._sent.synchronize()
        if entries > self._capacity:
            self._reserve(2 * entries)
        return self._arrays

    def _reserve(self, entries: int) -> None:
        self._capacity = entries
        self._memory = torch.empty(self._head + 4 * entries, dtype=torch.uint8, pin_memory=self._pinned)
        self._used, self.pages = 0, None
        whole = self._memory.numpy()
        self._arrays = {name: whole[begin:begin + count * np.dtype(dtype).itemsize].view(dtype)
                        for name, (begin, count, dtype) in self._places.items()}
        self._arrays["kv_indices"] = whole[self._head:].view(np.int32)

    def send(self, target: torch.Tensor, used: int) -> None:
        if used != self._used:  # a slice costs microseconds
            self._used, self._slices = used, (target[:used], self._memory[:used])
        there, here = self._slices
        there.copy_(here, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
