"""Host memory that the ranks of a host share where all of them have the same pages, as those of latents (MLA) do.

Each slot is written by one of the ranks, and loaded by all, each by its own link. The ranks' indexes are equal, so that
they make the same copies in the same order, each at its own time: copies out of the pool are numbered, and every rank
shows in the shared memory the number of the last one that it has completed. A load begins once the copies that it
follows are complete on all ranks; it is polled, and no rank waits for another. Nothing else is needed to know that a
slot may be written again: a load is over when that is true on all ranks, and its slots are kept until then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .page_copies import CompleteCopy, Copy, PageCopies

_POLL_SECONDS = 5e-4


@dataclass(frozen=True)
class HostShare:
    """The part of rank ``index`` of ``size`` in ``memory`` [n] uint8, which all of them map. ``begun`` and
    ``completed`` [size] int64 are there, too: the last of each rank's copies out of the pool, by number."""

    index: int
    size: int
    memory: np.ndarray
    begun: np.ndarray
    completed: np.ndarray

    HEADER_BYTES = 4096

    @classmethod
    def of(cls, index: int, size: int, memory: np.ndarray) -> HostShare:
        """Divides mapped ``memory``, zeros at first, of HEADER_BYTES more than the pages take."""
        begun, completed = memory[:16 * size].view(np.int64).reshape(2, size)
        return cls(index, size, memory[cls.HEADER_BYTES:], begun, completed)


class SharedStore:
    """A copy to slots, complete once all ranks' parts are. ``own`` is this rank's part of it, or of the last one of
    which it had one: who waits for a copy waits for those before it."""

    def __init__(self, own: Copy, number: int, share: HostShare):
        self.own = own
        self.number = number
        self.num_groups, self.num_bytes = own.num_groups, own.num_bytes
        self._share = share
        self._complete = False

    @property
    def complete(self) -> bool:
        self._complete = self._complete or self.number <= int(self._share.completed.min())
        return self._complete

    @property
    def num_complete(self) -> int:
        return self.num_groups if self.complete else 0

    @property
    def seconds(self) -> float:
        return self.own.seconds

    def synchronize(self) -> None:
        """Block until this rank's part is complete: its pages are not read any more."""
        self.own.synchronize()

    def wait_on_device(self, group: int | None = None) -> None:
        self.own.wait_on_device(group)


class SharedLoad:
    """A copy from slots, launched once the copies ``after`` it are complete on all ranks. Never complete in part: the
    slots that it reads may then be written by another rank, which does not see its events."""

    num_groups = 1

    def __init__(self, copies: PageCopies, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy],
                 num_bytes: int):
        self.num_bytes = num_bytes
        self._copies, self._slots, self._page_ids, self._after = copies, slots, page_ids, after
        self._copy: Copy | None = None

    @property
    def launched(self) -> bool:
        """True once it is on its way. Launches it where it can be."""
        if self._copy is None and all(copy.complete for copy in self._after):
            self._copy = self._copies.load(self._slots, self._page_ids, [])
            self._after = ()
        return self._copy is not None

    @property
    def complete(self) -> bool:
        return self._copy is not None and self._copy.complete

    @property
    def num_complete(self) -> int:
        return int(self.complete)

    @property
    def seconds(self) -> float:
        return 0.0 if self._copy is None else self._copy.seconds

    def synchronize(self) -> None:
        """Block until it is complete, if it was launched: else it reads and writes nothing."""
        if self._copy is not None:
            self._copy.synchronize()

    def wait_on_device(self, group: int | None = None) -> None:
        assert self._copy is not None, "a step reads pages before their load was over"
        self._copy.wait_on_device()


class SharedPageCopies:
    """This rank's part of all ranks' copies. Implements PageCopies, over those of its own device."""

    def __init__(self, copies: PageCopies, share: HostShare, page_bytes: int):
        self._copies, self._share, self._page_bytes = copies, share, page_bytes
        self._num_stores = 0
        self._last_own: Copy = CompleteCopy(0)
        self._stores: deque[SharedStore] = deque()  # not yet shown to the others as complete
        self._loads: deque[SharedLoad] = deque()  # that are not launched

    def load(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy]) -> SharedLoad:
        load = SharedLoad(self._copies, slots, page_ids, after, len(slots) * self._page_bytes)
        self._loads.append(load)
        self.advance()
        return load

    def store(self, slots: np.ndarray, page_ids: np.ndarray, after: Sequence[Copy]) -> SharedStore:
        self._num_stores += 1
        self._share.begun[self._share.index] = self._num_stores
        mine = slots % self._share.size == self._share.index
        if mine.any():
            self._last_own = self._copies.store(slots[mine], page_ids[:, mine], [
                copy.own if isinstance(copy, SharedStore) else copy for copy in after])
        store = SharedStore(self._last_own, self._num_stores, self._share)
        self._stores.append(store)
        return store

    def advance(self) -> None:
        """Shows the others what is complete, and launches the loads that can be; once a step."""
        while self._stores and self._stores[0].own.complete:
            self._share.completed[self._share.index] = self._stores.popleft().number
        while self._loads and self._loads[0].launched:
            self._loads.popleft()

    def catch_up(self) -> None:
        """Block until this rank has begun all copies that others have: its index knows then which slots they write. Not
        in the loop's thread."""
        while self._num_stores < int(self._share.begun.max()):
            time.sleep(_POLL_SECONDS)
