"""The memory that all processes of a router share: columns of counters, ring buffers, and a lock.

A column belongs to one child, the only one that writes it (aligned 8-byte stores, which readers see whole); the sum
over the columns counts for all. When a child dies the parent clears its column.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from types import TracebackType

MAX_WORKERS = 4096
MAX_KEYS = 16384
RING_WORDS = 2**17
"""1 MiB: the blocks of 8,000 prompts of 4 KB, far more than come between two looks at it."""

# Words of a child's own cells.
RING_HEAD, TTFT_WAITING, HEAD_PRIORITY, HEAD_SINCE = range(4)
COUNTERS = 8
"""The first of the words that policies count requests in, one for each policy that counts."""
_CELLS = 16
# Words of the cells that all processes write.
PACE, LEVEL, LEVEL_AT = range(3)
_COMMON = 16


class Lock:
    """Exclusion between processes, which the kernel ends where its owner dies; not for threads."""

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
        self._regions: dict[str, tuple[int, int]] = {}
        size = 0
        for name, words in (("common", _COMMON), ("running", count), ("queued", count), ("digests", MAX_KEYS),
                            ("key_levels", 2 * MAX_KEYS), ("cells", count * _CELLS), ("loads", count * MAX_WORKERS),
                            ("suspects", count * MAX_WORKERS),
                            ("key_running", count * MAX_KEYS), ("rings", count * RING_WORDS)):
            self._regions[name] = (size, words)
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
        """The child's requests on each row's worker."""
        return self._column("loads", child)

    def suspects(self, child: int) -> memoryview:
        """1 for each row on whose worker the child has a suspect in quarantine, else 0."""
        return self._column("suspects", child)

    def loads_at(self, child: int) -> int:
        """Offset in ``memory`` at which a child's loads begin, in bytes."""
        return 8 * (self._regions["loads"][0] + child * MAX_WORKERS)

    @property
    def digests_at(self) -> tuple[int, int]:
        """Offsets in ``memory`` at which the keys' digests begin and end, in bytes."""
        start, words = self._regions["digests"]
        return 8 * start, 8 * (start + words)

    def key_running(self, child: int) -> memoryview:
        """Running requests of each row's API key."""
        return self._column("key_running", child)

    def ring(self, child: int) -> memoryview:
        """The ring buffer of a child's records."""
        return self._column("rings", child)

    def total(self, row: int) -> int:
        """The load of a row's worker, over all children."""
        start = self._regions["loads"][0] + row
        return sum(self._words[start + child * MAX_WORKERS] for child in range(self.count))

    def clear(self, child: int) -> None:
        """Sets all counts of a child that has died to 0."""
        head = self.cells(child)[RING_HEAD]
        for view in (self.cells(child), self.loads(child), self.suspects(child), self.key_running(child)):
            view[:] = memoryview(bytes(8 * len(view))).cast("q")
        self.cells(child)[RING_HEAD] = head  # The ring buffer continues: its readers know how far they are.
        self.running[child] = self.queued[child] = 0

    def _view(self, name: str) -> memoryview:
        start, words = self._regions[name]
        return self._words[start:start + words]

    def _float_view(self, name: str) -> memoryview[float]:
        start, words = self._regions[name]
        return self._floats[start:start + words]

    def _column(self, name: str, child: int) -> memoryview:
        start, words = self._regions[name]
        each = words // self.count
        return self._words[start + child * each:start + (child + 1) * each]


class SharedCount:
    """A count over all children: ``value`` is the sum, and ``count.value += 1`` adds to this child's own word.

    Whatever others add between the reading and the writing of such a line counts too. ``next()`` counts one further and
    returns the sum: numbers that count up over all processes.
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
