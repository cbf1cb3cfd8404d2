"""What each child sent to whom, told to the others through a ring in shared memory.

A record is ``[length and kind, subject, number, words...]``: of a prefix memory the worker's id, the memory's capacity
and the blocks' hashes. The writer publishes its head, in words ever written, after the record. A reader that was
overtaken skips to the head: what it missed costs a cache hit. So would a word read while it was written, which
processors that reorder stores allow: words are only ever looked up, never trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

from .shared_stats import RING_HEAD, RING_WORDS, SharedStats

_HEAD = 3
_KIND_BITS = 32
_KIND = 2**_KIND_BITS - 1
_MOST = RING_WORDS // 8
"""Words of a record at most; of a longer one the end is left out."""
_SKIP = 0
"""A first word that says: the next record is at the ring's beginning."""

Apply = Callable[[list[int], int, int], None]
"""``apply(words, subject, number)``."""


@lru_cache(1024)
def words(count: int) -> struct.Struct:
    """So many int64 words in a row."""
    return struct.Struct(f"{count}q")


class RingWriter:
    """The ring of this process."""

    def __init__(self, board: SharedStats, child: int):
        self._ring = board.ring(child)
        self._cells = board.cells(child)
        self._head = self._cells[RING_HEAD]

    def write(self, kind: int, subject: int, number: int, content: Sequence[int]) -> None:
        """``kind`` is 1 to 2**32 - 1; ``content`` is int64 words."""
        if len(content) > _MOST - _HEAD:
            content = content[:_MOST - _HEAD]
        count = len(content) + _HEAD
        at = self._head % RING_WORDS
        if at + count > RING_WORDS:
            self._ring[at] = _SKIP
            self._head += RING_WORDS - at
            at = 0
        words(count).pack_into(self._ring, 8 * at, count << _KIND_BITS | kind, subject, number, *content)
        self._head += count
        self._cells[RING_HEAD] = self._head


class RingReader:
    """Another child's ring, read up to ``at``; ``apply`` takes its records by kind."""

    def __init__(self, board: SharedStats, child: int):
        self._ring = board.ring(child)
        self.at = board.cells(child)[RING_HEAD]
        self.apply: dict[int, Apply] = {}

    def read(self, head: int) -> None:
        """Take in what is new, up to the writer's head."""
        at, self.at = self.at, head
        while at < head:
            if head - at > RING_WORDS // 2:  # Its writer is about to overtake us.
                return
            place = at % RING_WORDS
            found = self._ring[place:place + head - at].tolist()  # A piece of the ring; it ends with a record.
            at += len(found)
            start, end = 0, len(found)
            while start < end:
                first = found[start]
                stop = start + (first >> _KIND_BITS)
                if stop < start + _HEAD:  # The rest of the ring was skipped, or this was overwritten.
                    break
                apply = self.apply.get(first & _KIND)
                if apply is not None:
                    apply(found[start + _HEAD:stop], found[start + 1], found[start + 2])
                start = stop
