"""Operations of a storage that are under way: what the rank's loop sees of them, and the threads that do the work."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from ..page_keys import PageKey


class StorageQuery:
    """A search for the leading pages that a storage has. ``count`` grows; it is final once ``done``."""

    def __init__(self, keys: Sequence[PageKey], is_aside: Callable[[], bool]):
        self.keys = keys
        self.count = 0
        self._is_aside = is_aside
        self._ended = False

    def __repr__(self) -> str:
        return f"StorageQuery({self.count} of {len(self.keys)} pages{', done' if self._ended else ''})"

    @property
    def done(self) -> bool:
        """True too where the storage was put aside: nobody waits for it. Never blocks."""
        if not self._ended and self._is_aside():
            self._ended = True
        return self._ended

    def cancel(self) -> None:
        """Ends the search; ``count`` stays what it is."""
        self._ended = True

    def found(self, count: int, *, last: bool) -> None:
        """By the thread that searches: ``count`` pages so far."""
        if not self._ended:
            self.count = count
            self._ended = last


class StorageRead:
    """Pages that are read into slots of host memory, in any order. ``num_pages`` leading ones are there so far; final
    once ``done``, and from then on nothing is written into the other slots."""

    def __init__(self, keys: Sequence[PageKey], slots: np.ndarray, is_aside: Callable[[], bool]):
        assert len(keys) == len(slots)
        self.keys, self.slots = keys, slots
        self._is_aside = is_aside
        self._changed = threading.Condition()
        self._is_there = bytearray(len(keys))
        self._num_pages, self._end = 0, len(keys)
        self._copying = 0

    def __repr__(self) -> str:
        return f"StorageRead({self._num_pages} of {len(self.keys)} pages{', done' if self.done else ''})"

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def done(self) -> bool:
        """True too where the storage was put aside: nobody waits for it. Never blocks."""
        if self._num_pages < self._end and self._is_aside():
            self.end_at(0)
        return self._num_pages >= self._end and not self._copying

    def cancel(self) -> None:
        """Ends the read with the pages that are there; blocks while one is being copied into its slot, below 1 ms."""
        self.end_at(0)
        with self._changed:
            self._changed.wait_for(lambda: not self._copying)

    def end_at(self, index: int) -> None:
        """Ends the read before page ``index``, or with the pages that are there if these are more."""
        with self._changed:
            self._end = min(self._end, max(index, self._num_pages))

    def wants(self, index: int) -> bool:
        """False once page ``index`` is of no use to anybody."""
        return index < self._end

    def copy(self, index: int, copy: Callable[[], None]) -> None:
        """By a thread that has read page ``index``: copies it into its slot, unless the read has ended before it."""
        with self._changed:
            if index >= self._end:
                return
            self._copying += 1
        try:
            copy()
            self._is_there[index] = True
        finally:
            with self._changed:
                self._copying -= 1
                while self._num_pages < self._end and self._is_there[self._num_pages]:
                    self._num_pages += 1
                self._changed.notify_all()


class Workers:
    """Threads that run jobs in their order. A job that hangs in a library does not keep the process alive."""

    def __init__(self, name: str, count: int):
        self._jobs: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            job()
            del job  # with the buffers that it refers to, while there is no other

    def close(self, timeout: float) -> bool:
        """Drops the jobs that wait and ends the threads; False where one has not ended by then."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
