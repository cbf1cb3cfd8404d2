"""Host KV cache: pages in host memory, for retracted requests."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from ...api.errors import ConfigError
from ...kvcache.allocator import PageAllocator
from ...kvcache.pool import KVPool


class HostKVCache:
    """Slots for as many pages as fit into ``num_bytes``, allocated at once because pinning memory takes long.

    Copies run on the device's current stream, after the kernels that compute the pages and before those that will
    overwrite them: the host waits for none of them.
    """

    def __init__(self, pool: KVPool, num_bytes: int):
        """Raises ConfigError where the host lacks this memory, or no page fits into it."""
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
        return f"HostKVCache({self.num_allocated} of {self.num_pages} allocated)"

    def _pin(self) -> None:
        """Pin the memory by CUDA's own call: torch's allocator of pinned memory rounds up to a power of two."""
        cudart: Any = torch.cuda.cudart()
        for group in self._groups:
            if int(cudart.cudaHostRegister(group.data_ptr(), group.nbytes, 0)) != 0:
                raise ConfigError(f"{group.nbytes / 2**30:.1f} GiB of host memory cannot be pinned; lower "
                                  "--retract-host-memory-gb, or raise the limit of locked memory.")
            weakref.finalize(self, _unpin, group).atexit = False

    @property
    def num_pages(self) -> int:
        return self._slots.num_pages

    @property
    def num_allocated(self) -> int:
        return self._slots.num_pages - self._slots.num_free

    @torch.no_grad()
    def copy_out(self, page_ids: np.ndarray) -> np.ndarray | None:
        """Copy pages of the pool to the host; returns their slots, None where too few are free."""
        if len(page_ids) > self._slots.num_free:
            return None
        slots = self._slots.allocate(len(page_ids))
        for slot, page, count in _runs(slots, page_ids):
            for host, device in zip(self._groups, self._pool.groups):
                host[slot:slot + count].copy_(device[page:page + count], non_blocking=True)
        return slots

    @torch.no_grad()
    def copy_in(self, slots: np.ndarray, page_ids: np.ndarray) -> None:
        """Copy slots into pages of the pool."""
        for slot, page, count in _runs(slots, page_ids):
            for host, device in zip(self._groups, self._pool.groups):
                device[page:page + count].copy_(host[slot:slot + count], non_blocking=True)

    def free(self, slots: np.ndarray) -> None:
        """Free slots. A copy from them may still be queued: the next owner writes after it on the stream."""
        self._slots.free(slots)

    def synchronize(self) -> None:
        """Wait until all copies are done."""
        if self._pool.groups[0].is_cuda:
            torch.cuda.current_stream(self._pool.groups[0].device).synchronize()


def _unpin(group: torch.Tensor) -> None:
    """Unpin memory before it is freed."""
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(group.data_ptr())


def _runs(slots: np.ndarray, page_ids: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yields ``(first slot, first page, count)`` of the runs in which both are contiguous: one copy each."""
    assert len(slots) == len(page_ids)
    breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(page_ids) != 1)) + 1
    begins = [0, *breaks.tolist()] if len(slots) else []
    for begin, end in zip(begins, [*begins[1:], len(slots)]):
        yield int(slots[begin]), int(page_ids[begin]), end - begin
