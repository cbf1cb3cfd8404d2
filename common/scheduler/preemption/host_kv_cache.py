"""KV pages in host memory, for requests that were retracted."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import torch

from ...api.errors import ConfigError
from ...kvcache.allocator import PageAllocator
from ...kvcache.pool import KVPool


class HostKVCache:
    """As many pages as fit into ``num_bytes``, taken at once, for pinning memory takes long.

    Copies are put on the device's current stream, behind what computes the pages and before what will write into them:
    the host waits for none of them.
    """

    def __init__(self, pool: KVPool, num_bytes: int):
        """Raises ConfigError where there is no such memory, or no page fits into it."""
        self._pool = pool
        self.page_bytes = sum(group[0].nbytes for group in pool.groups)
        count = num_bytes // self.page_bytes
        if not count:
            raise ConfigError(f"--retract-host-memory-gb {num_bytes / 2**30:g} holds no page of {self.page_bytes} "
                              "bytes; raise it, or leave it out.")
        try:
            self._groups = [torch.empty((count, *group.shape[1:]), dtype=group.dtype) for group in pool.groups]
        except RuntimeError:  # torch's for memory of the host
            raise ConfigError(f"The host has no {num_bytes / 2**30:g} GiB for --retract-host-memory-gb; lower it."
                              ) from None
        if pool.groups[0].is_cuda:
            self._pin()
        self._slots = PageAllocator(count)

    def __repr__(self) -> str:
        return f"HostKVCache({self.num_held} of {self.num_pages} held)"

    def _pin(self) -> None:
        """Without torch's allocator of pinned memory, which rounds up to a power of two."""
        cudart = torch.cuda.cudart()
        for group in self._groups:
            if int(cudart.cudaHostRegister(group.data_ptr(), group.nbytes, 0)) != 0:
                raise ConfigError(f"{group.nbytes / 2**30:.1f} GiB of host memory cannot be pinned; lower "
                                  "--retract-host-memory-gb, or raise the limit of locked memory.")
            weakref.finalize(self, _unpin, group).atexit = False

    @property
    def num_pages(self) -> int:
        return self._slots.num_pages

    @property
    def num_held(self) -> int:
        return self._slots.num_pages - self._slots.num_free

    @torch.no_grad()
    def save(self, page_ids: np.ndarray) -> np.ndarray | None:
        """Copy pages of the pool here; returns the slots that hold them, None where there is too little room."""
        if len(page_ids) > self._slots.num_free:
            return None
        slots = self._slots.allocate(len(page_ids))
        for slot, page, count in _runs(slots, page_ids):
            for mine, theirs in zip(self._groups, self._pool.groups):
                mine[slot:slot + count].copy_(theirs[page:page + count], non_blocking=True)
        return slots

    @torch.no_grad()
    def restore(self, slots: np.ndarray, page_ids: np.ndarray) -> None:
        """Copy slots into pages of the pool."""
        for slot, page, count in _runs(slots, page_ids):
            for mine, theirs in zip(self._groups, self._pool.groups):
                theirs[page:page + count].copy_(mine[slot:slot + count], non_blocking=True)

    def free(self, slots: np.ndarray) -> None:
        """A copy from them may still be on its way: whoever gets them next writes behind it on the stream."""
        self._slots.free(slots)

    def wait(self) -> None:
        """Until all copies have been made."""
        if self._pool.groups[0].is_cuda:
            torch.cuda.current_stream(self._pool.groups[0].device).synchronize()


def _unpin(group: torch.Tensor) -> None:
    """Before its memory goes back."""
    torch.cuda.cudart().cudaHostUnregister(group.data_ptr())


def _runs(slots: np.ndarray, page_ids: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """``(first slot, first page, count)`` of the stretches in which both are neighbours: one copy each."""
    assert len(slots) == len(page_ids)
    breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(page_ids) != 1)) + 1
    begins = [0, *breaks.tolist()] if len(slots) else []
    for begin, end in zip(begins, [*begins[1:], len(slots)]):
        yield int(slots[begin]), int(page_ids[begin]), end - begin
