"""The memory that all processes of a router share: columns of counters, rings, and a lock.

A column belongs to one child, the only one that writes it (aligned 8-byte stores, which readers see whole); a sum
over the columns is what holds for all. When a child dies the parent clears its column.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from types import TracebackType

MOST_WORKERS = 4096
MOST_KEYS = 16384
RING_WORDS = 2**17
"""1 MiB: the blocks of 8,000 prompts of 4 KB, far more than come between two looks at it."""

# Words of a child's own cells.
RING_HEAD, TTFT_WAITING, HEAD_PRIORITY, HEAD_SINCE = range(4)
TURNS = 8
"""The first of the words that count turns, one for each policy that takes turns."""
_CELLS = 16
# Words of everybody's cells.
PACE, LEVEL, LEVEL_AT = range(3)
_COMMON = 16


class Lock:
    """Exclusion between processes that the kernel ends with its holder's life; not for threads."""

    def __init__(self, file: int):
        self._file = file

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)


class SharedStats:
    """The memory, seen as int64 words (``_floats``: the same as doubles). ``file`` is inherited by children."""

    def __init__(self, file: int, count: int):
        self.file = file
        self.count = count
        self._parts: dict[str, tuple[int, int]] = {}
        size = 0
        for name, words in (("common", _COMMON), ("running", count), ("queued", count), ("digests", MOST_KEYS),
                            ("key_levels", 2 * MOST_KEYS), ("cells", count * _CELLS), ("loads", count * MOST_WORKERS),
                            ("suspects", count * MOST_WORKERS),
                            ("key_running", count * MOST_KEYS), ("rings", count * RING_WORDS)):
            self._parts[name] = (size, words)
            size += words
        if os.fstat(file).st_size == 0:
            os.ftruncate(file, 8 * size)
        self.memory = mmap.mmap(file, 8 * size)
        self.lock = Lock(file)
        self._words = memoryview(self.memory).cast("q")
        self._floats: memoryview[float] = memoryview(self.memory).cast("d")
        self.running = self._view("running")
        self.queued = self._view("queued")
        self.digests = self._view("digests")
        self.common = self._float_view("common")
        self.key_levels = self._float_view("key_levels")

    @classmethod
    def create(cls, count: int) -> SharedStats:
        return cls(os.memfd_create("baton-router", os.MFD_CLOEXEC), count)

    def cells(self, child: int) -> memoryview:
        return self._column("cells", child)

    def loads(self, child: int) -> memoryview:
        """Requests on each row's worker."""
        return self._column("loads", child)

    def suspects(self, child: int) -> memoryview:
        """Whether the child has a suspect in quarantine on each row's worker."""
        return self._column("suspects", child)

    def loads_at(self, child: int) -> int:
        """Where in ``memory`` a child's loads begin, in bytes."""
        return 8 * (self._parts["loads"][0] + child * MOST_WORKERS)

    @property
    def digests_at(self) -> tuple[int, int]:
        start, words = self._parts["digests"]
        return 8 * start, 8 * (start + words)

    def key_running(self, child: int) -> memoryview:
        return self._column("key_running", child)

    def ring(self, child: int) -> memoryview:
        return self._column("rings", child)

    def total(self, row: int) -> int:
        """The load of a row's worker, over all children."""
        start = self._parts["loads"][0] + row
        return sum(self._words[start + child * MOST_WORKERS] for child in range(self.count))

    def clear(self, child: int) -> None:
        """Forget what a child held; it must be gone."""
        head = self.cells(child)[RING_HEAD]
        for view in (self.cells(child), self.loads(child), self.suspects(child), self.key_running(child)):
            view[:] = memoryview(bytes(8 * len(view))).cast("q")
        self.cells(child)[RING_HEAD] = head  # The ring goes on: its readers know how far they are.
        self.running[child] = self.queued[child] = 0

    def _view(self, name: str) -> memoryview:
        start, words = self._parts[name]
        return self._words[start:start + words]

    def _float_view(self, name: str) -> memoryview[float]:
        start, words = self._parts[name]
        return self._floats[start:start + words]

    def _column(self, name: str, child: int) -> memoryview:
        start, words = self._parts[name]
        each = words // self.count
        return self._words[start + child * each:start + (child + 1) * each]


class SharedCount:
    """A count over all children: ``value`` is the sum, and ``count.value += 1`` adds to this child's own word.

    Whatever others add between the reading and the writing of such a line is kept. ``next()`` counts one further and
    returns the sum: turns that go round over all processes.
    """

    __slots__ = ("_columns", "_own", "_at", "_read")

    def __init__(self, columns: Sequence[memoryview], child: int, at: int):
        self._columns = columns
        self._own = columns[child]
        self._at = at
        self._read = 0

    @property
    def value(self) -> int:
        at = self._at
        self._read = sum([column[at] for column in self._columns])
        return self._read

    @value.setter
    def value(self, value: int) -> None:
        self._own[self._at] += value - self._read

    def __iter__(self) -> SharedCount:
        return self

    def __next__(self) -> int:
        self._own[self._at] += 1
        return self.value
