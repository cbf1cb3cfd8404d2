"""What each child sent to whom, told to the others through a ring in shared memory.

A record is ``[kind and length, subject, number, words...]``: of a prefix memory the worker's id, the memory's capacity
and the blocks' hashes. The writer publishes its head, in words ever written, after the record. A reader that was
overtaken skips to the head: what it missed costs a cache hit. So would a word read while it was written, which
processors that reorder stores allow: words are only ever looked up, never trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

from .board import RING_HEAD, RING_WORDS, Board

_HEAD = 3
_MOST = RING_WORDS // 8
"""Words of a record at most; of a longer one the end is left out."""
_SKIP = 0
"""A first word that says: the next record is at the ring's beginning."""

Apply = Callable[[int, int, list[int]], None]
"""``apply(subject, number, words)``."""


@lru_cache(1024)
def words(count: int) -> struct.Struct:
    """So many int64 words in a row."""
    return struct.Struct(f"{count}q")


class RingWriter:
    """The ring of this process."""

    def __init__(self, board: Board, child: int):
        self._ring = board.ring(child)
        self._cells = board.cells(child)
        self._head = self._cells[RING_HEAD]

    def write(self, kind: int, subject: int, number: int, content: Sequence[int]) -> None:
        """``kind`` is 1 to 255; ``content`` is int64 words."""
        if len(content) > _MOST - _HEAD:
            content = content[:_MOST - _HEAD]
        count = len(content) + _HEAD
        at = self._head % RING_WORDS
        if at + count > RING_WORDS:
            self._ring[at] = _SKIP
            self._head += RING_WORDS - at
            at = 0
        words(count).pack_into(self._ring, 8 * at, count << 8 | kind, subject, number, *content)
        self._head += count
        self._cells[RING_HEAD] = self._head


class RingReader:
    """Another child's ring, read up to ``at``; ``apply`` takes its records by kind."""

    def __init__(self, board: Board, child: int):
        self._ring = board.ring(child)
        self.at = board.cells(child)[RING_HEAD]
        self.apply: dict[int, Apply] = {}

    def read(self, head: int) -> None:
        """Take in what is new, up to the writer's head."""
        while self.at < head:
            if head - self.at > RING_WORDS // 2:  # Its writer is about to overtake us.
                break
            place = self.at % RING_WORDS
            end = min(place + head - self.at, RING_WORDS)
            self._take(self._ring[place:end].tolist())
            self.at += end - place
        self.at = head

    def _take(self, found: list[int]) -> None:
        """Apply the records of a piece of the ring, which ends with one."""
        at = 0
        while at < len(found):
            first = found[at]
            count = first >> 8
            if count < _HEAD:  # The rest of the ring was skipped, or this was overwritten.
                return
            apply = self.apply.get(first & 255)
            if apply is not None:
                apply(found[at + 1], found[at + 2], found[at + _HEAD:at + count])
            at += count
