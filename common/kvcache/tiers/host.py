"""Host memory as a KV tier: the least recently used pages make room for new ones."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...api.errors import ConfigError
from ...config.server.cache import KV_TIERS
from ..allocator import PageAllocator
from ..page_keys import PageKey
from ..pool import KVPool
from .base import TierContext, TierCounters


@dataclass(frozen=True)
class StreamTask:
    """A copy that was queued on the pool's current stream."""

    num_pages: int
    pool: KVPool
    done: bool = True

    def wait(self) -> None:
        if self.pool.groups[0].is_cuda:
            torch.cuda.current_stream(self.pool.groups[0].device).synchronize()


@KV_TIERS.register("host")
class HostTier:
    """Slots for as many pages as fit into the context's bytes, allocated at once because pinning memory takes long.

    Copies run on the device's current stream, after the kernels that compute the pages and before those that will
    overwrite them: the host waits for none of them.
    """

    def __init__(self, context: TierContext):
        """Raises ConfigError where the host lacks this memory, or no page fits into it."""
        self._pool, self._device_groups = context.pool, context.groups
        self.counters = TierCounters()
        self.page_bytes = sum(group[0].nbytes for group in self._device_groups)
        count, gigabytes = context.num_bytes // self.page_bytes, context.num_bytes / 2**30
        if not count:
            raise ConfigError(f"{context.flag} {gigabytes:g} holds no page of {self.page_bytes} bytes; raise it, or "
                              "leave it out.")
        try:
            self._groups = [torch.empty((count, *group.shape[1:]), dtype=group.dtype)
                            for group in self._device_groups]
        except RuntimeError:  # torch's for memory of the host
            raise ConfigError(f"The host has no {gigabytes:g} GiB for {context.flag}; lower it.") from None
        if self._device_groups[0].is_cuda:
            self._pin(context.flag)
        self._slots = PageAllocator(count)
        self._slot_of: dict[PageKey, int] = {}  # the least recently used first

    def __repr__(self) -> str:
        return f"HostTier({self.num_pages} of {self.capacity} pages)"

    def _pin(self, flag: str) -> None:
        """Pin the memory by CUDA's own call: torch's allocator of pinned memory rounds up to a power of two."""
        cudart: Any = torch.cuda.cudart()
        for group in self._groups:
            if int(cudart.cudaHostRegister(group.data_ptr(), group.nbytes, 0)) != 0:
                raise ConfigError(f"{group.nbytes / 2**30:.1f} GiB of host memory cannot be pinned; lower {flag}, or "
                                  "raise the limit of locked memory.")
            weakref.finalize(self, _unpin, group).atexit = False

    @property
    def capacity(self) -> int:
        return self._slots.num_pages

    @property
    def num_pages(self) -> int:
        return len(self._slot_of)

    def lookup(self, keys: Sequence[PageKey]) -> int:
        return next((i for i, key in enumerate(keys) if key not in self._slot_of), len(keys))

    @torch.no_grad()
    def store(self, keys: Sequence[PageKey], page_ids: np.ndarray) -> StreamTask:
        present = [key for key in keys if key in self._slot_of]
        self._touch(present)
        new = [i for i, key in enumerate(keys) if key not in self._slot_of][:self.capacity - len(present)]
        if len(new) > self._slots.num_free:
            self._evict(len(new) - self._slots.num_free)
        slots = self._slots.allocate(len(new))
        for slot, page, count in _runs(slots, page_ids[new]):
            for host, device in zip(self._groups, self._device_groups):
                host[slot:slot + count].copy_(device[page:page + count], non_blocking=True)
        self._slot_of.update(zip([keys[i] for i in new], slots.tolist()))
        self.counters.stored += len(new)
        return StreamTask(self.lookup(keys), self._pool)

    @torch.no_grad()
    def load(self, keys: Sequence[PageKey], page_ids: np.ndarray) -> StreamTask:
        present = keys[:self.lookup(keys)]
        slots = np.array([self._slot_of[key] for key in present], np.int64)
        for slot, page, count in _runs(slots, page_ids[:len(present)]):
            for host, device in zip(self._groups, self._device_groups):
                device[page:page + count].copy_(host[slot:slot + count], non_blocking=True)
        self._touch(present)
        self.counters.loaded += len(present)
        return StreamTask(len(present), self._pool)

    def free(self, keys: Sequence[PageKey]) -> None:
        """A copy from the slots may still be queued: the next owner writes after it on the stream."""
        slots = [slot for key in keys if (slot := self._slot_of.pop(key, None)) is not None]
        self._slots.free(np.array(slots, np.int64))

    def clear(self) -> None:
        self.free(list(self._slot_of))

    def poll(self) -> None:
        """There is nothing to advance: the stream does it."""

    def close(self) -> None:
        """There is nothing to close: the memory goes with the object."""

    def _touch(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self._slot_of[key] = self._slot_of.pop(key)

    def _evict(self, count: int) -> None:
        self.free([key for key, _ in zip(self._slot_of, range(count))])
        self.counters.evicted += count


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
