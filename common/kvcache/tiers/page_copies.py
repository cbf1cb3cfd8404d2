"""Copies of pages between a device's pool and slots of host memory, off the stream that computes.

On a GPU a stream of its own carries each direction, so that both use the link at once and neither waits for a step. Two
ways to copy: ``kernel`` reads and writes pinned host memory from a few SMs and does not mind how pages lie; ``direct``
gives the copy engines one command for each run of pages that are neighbours in both memories, and takes no SM.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ....kernels.comm.copy_blocks import copy_blocks
from ..cache_group import ABSENT
from .base import TierContext
from .batch_copy import load_batch_copy
from .slot_memory import SlotMemory

logger = logging.getLogger(__name__)

PROGRAMS = 16
"""SMs that a copy by kernel takes from the steps that run beside it."""


class Copy(Protocol):
    """A copy of pages, layer group by layer group, which was launched."""

    num_groups: int
    num_bytes: int

    @property
    def complete(self) -> bool:
        """True once all memories have it. Never blocks."""

    @property
    def num_complete(self) -> int:
        """Leading layer groups that are complete."""
        ...

    def synchronize(self) -> None:
        """Block until it is complete. Any thread."""

    def wait_on_device(self, group: int | None = None) -> None:
        """Let the current stream wait for a layer group, or for all."""

    @property
    def seconds(self) -> float:
        """How long the complete copy took, 0 where that is not known."""
        ...


class PageCopies(Protocol):
    """Launches copies of pages from or to ``slots`` [n]. A layer group goes by the ids of its cache group, a row of
    ``page_ids`` [cache groups, n], and is not copied where that is ABSENT. A copy begins after what the current stream
    has been given, and after the copies ``after``."""

    def load(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy]) -> Copy:
        """Slots to pages."""
        ...

    def store(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy]) -> Copy:
        """Pages to slots."""
        ...


class CompleteCopy:
    """A copy that was complete when it was launched."""

    num_groups = 1
    num_complete = 1
    complete = True
    seconds = 0.0

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes

    def synchronize(self) -> None:
        """There is nothing to wait for."""

    def wait_on_device(self, group: int | None = None) -> None:
        """There is nothing to wait for."""


class HostPageCopies:
    """Copies of a pool in host memory."""

    def __init__(self, context: TierContext, memory: SlotMemory):
        self._pages = [group.view(len(group), -1).view(torch.uint8) for group in context.groups]  # they may move
        self._cache_groups = context.cache_groups
        self._slots = memory.arrays

    def load(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy]) -> Copy:
        num_bytes = 0
        for number, pages, array in zip(self._cache_groups, self._pages, self._slots):
            there, ids = present(slots, page_ids[number])
            pages.numpy()[ids] = array[there]
            num_bytes += len(ids) * array.shape[1]
        return CompleteCopy(num_bytes)

    def store(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy]) -> Copy:
        for number, pages, array in zip(self._cache_groups, self._pages, self._slots):
            array[slots] = pages.numpy()[page_ids[number]]
        return CompleteCopy(len(slots) * sum(array.shape[1] for array in self._slots))


def present(slots: np.ndarray, page_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The slots and pages of one cache group that are not ABSENT."""
    if page_ids.min(initial=0) >= 0:
        return slots, page_ids
    there = page_ids != ABSENT
    return slots[there], page_ids[there]


class CudaCopy:
    """Events of a copy on a stream: its begin, and the end of each layer group."""

    def __init__(self, begin: torch.cuda.Event, groups: list[torch.cuda.Event], num_bytes: int, kept: object):
        """``kept`` lives as long as the copy may read it."""
        self.num_groups = len(groups)
        self.num_bytes = num_bytes
        self._begin, self._groups = begin, groups
        self._num_complete = 0
        self._kept = kept

    @property
    def num_complete(self) -> int:
        count = self._num_complete
        while count < self.num_groups and self._groups[count].query():
            count += 1
        self._num_complete = count  # other threads ask, too, and find the same
        return count

    @property
    def complete(self) -> bool:
        return self.num_complete == self.num_groups

    def synchronize(self) -> None:
        self._groups[-1].synchronize()

    def wait_on_device(self, group: int | None = None) -> None:
        torch.cuda.current_stream().wait_event(self._groups[-1 if group is None else group])

    @property
    def seconds(self) -> float:
        elapsed: float = self._begin.elapsed_time(self._groups[-1])
        return elapsed / 1e3


class CudaPageCopies:
    """Copies of a pool on a GPU, which is the current device. A subclass enqueues those of a layer group."""

    def __init__(self, context: TierContext, memory: SlotMemory):
        self._groups = [group.view(len(group), -1).view(torch.uint8) for group in context.groups]
        self._cache_groups = context.cache_groups
        self._device = self._groups[0].device
        self._memory = memory
        self._streams = [torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)]
        scratch = np.array([[pool.num_pages - 1] for pool in (context.pool, *context.further)])  # zeros, no request's
        for copy in (self.store(np.zeros(1, np.int64), scratch, ()), self.load(np.zeros(1, np.int64), scratch, ())):
            copy.synchronize()  # compiles the kernel before it is needed

    def prepare(self, slots: np.ndarray, page_ids: np.ndarray, *, to_device: bool) -> Any:
        """Returns what ``copy_group`` needs for all groups of a cache group; it is kept until the copy has ended."""
        raise NotImplementedError

    def copy_group(self, group: int, prepared: Any, *, to_device: bool) -> None:
        """Enqueues a group's copies on the current stream."""
        raise NotImplementedError

    def load(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy]) -> CudaCopy:
        return self._launch(slots, page_ids, after, to_device=True)

    def store(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy]) -> CudaCopy:
        return self._launch(slots, page_ids, after, to_device=False)

    @torch.no_grad()
    def _launch(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy], *, to_device: bool) -> CudaCopy:
        stream = self._streams[to_device]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        ends = []
        with torch.cuda.stream(stream):
            for earlier in after:
                earlier.wait_on_device()
            begin = torch.cuda.Event(enable_timing=True)
            chosen = [present(slots, ids) for ids in page_ids]
            prepared = [self.prepare(*pairs, to_device=to_device) for pairs in chosen]
            begin.record(stream)
            for group, number in enumerate(self._cache_groups):
                if len(chosen[number][0]):
                    self.copy_group(group, prepared[number], to_device=to_device)
                ends.append(torch.cuda.Event(enable_timing=True))
                ends[-1].record(stream)
        num_bytes = sum(group.shape[1] * len(chosen[number][0])
                        for group, number in zip(self._groups, self._cache_groups))
        return CudaCopy(begin, ends, num_bytes, prepared)


class KernelPageCopies(CudaPageCopies):
    """Copies by a kernel on a few SMs, which reads or writes the pinned memory itself."""

    def prepare(self, slots: np.ndarray, page_ids: np.ndarray, *, to_device: bool) -> torch.Tensor:
        host = torch.empty((2, len(slots)), dtype=torch.int64, pin_memory=True)
        host.numpy()[:] = (slots, page_ids) if to_device else (page_ids, slots)
        return host.to(self._device, non_blocking=True)

    def copy_group(self, group: int, prepared: torch.Tensor, *, to_device: bool) -> None:
        device, host = self._groups[group].data_ptr(), self._memory.arrays[group].ctypes.data
        source, target = (host, device) if to_device else (device, host)
        copy_blocks(source, target, prepared, self._groups[group].shape[1], programs=PROGRAMS)


class Runs(NamedTuple):
    """Runs of pages that are neighbours in both memories, [n] each: the first slots, the first pages, the numbers of
    both."""

    slots: np.ndarray
    pages: np.ndarray
    counts: np.ndarray


class DirectPageCopies(CudaPageCopies):
    """Copies by the copy engines, one for each run."""

    def __init__(self, context: TierContext, memory: SlotMemory):
        self._batch = load_batch_copy()
        try:
            super().__init__(context, memory)  # tries a copy
        except RuntimeError as error:
            if self._batch is None:
                raise
            logger.warning("Pages are copied one by one, because %s.", error)
            self._batch = None
            super().__init__(context, memory)

    def prepare(self, slots: np.ndarray, page_ids: np.ndarray, *, to_device: bool) -> Runs:
        return runs(slots, page_ids, self._memory.chunk_of(slots))

    def copy_group(self, group: int, prepared: Runs, *, to_device: bool) -> None:
        device, host = self._groups[group], self._memory.arrays[group]
        if self._batch is not None:
            size = device.shape[1]
            at_device = (device.data_ptr() + prepared.pages * size).astype(np.uint64)
            at_host = (host.ctypes.data + prepared.slots * size).astype(np.uint64)
            targets, sources = (at_device, at_host) if to_device else (at_host, at_device)
            self._batch(targets, sources, (prepared.counts * size).astype(np.uint64),
                        torch.cuda.current_stream(self._device).cuda_stream)
            return
        slots = torch.from_numpy(host)
        for slot, page, count in zip(*(array.tolist() for array in prepared)):
            ends = device[page:page + count], slots[slot:slot + count]
            target, source = ends if to_device else ends[::-1]
            target.copy_(source, non_blocking=True)


IO_BACKENDS: Mapping[str, type[CudaPageCopies]] = {"kernel": KernelPageCopies, "direct": DirectPageCopies}
"""By ``--hicache-io-backend``."""


def runs(slots: np.ndarray, page_ids: np.ndarray, chunks: np.ndarray) -> Runs:
    """The runs in which slots and pages are contiguous, in one chunk: one copy each."""
    assert len(slots) == len(page_ids)
    if not len(slots):
        return Runs(slots, page_ids, np.empty(0, np.int64))
    breaks = np.flatnonzero((np.diff(slots) != 1) | (np.diff(page_ids) != 1) | (np.diff(chunks) != 0)) + 1
    begins = np.concatenate(([0], breaks))
    return Runs(slots[begins], page_ids[begins], np.diff(np.append(begins, len(slots))))
