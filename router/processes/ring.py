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
def _packer(count: int) -> Callable[..., None]:
    return struct.Struct(f"{count}q").pack_into


class RingWriter:
    """The ring of this process."""

    def __init__(self, board: Board, child: int):
        self._ring = board.ring(child)
        self._bytes = self._ring.cast("B")
        self._cells = board.cells(child)
        self._head = self._cells[RING_HEAD]

    def write(self, kind: int, subject: int, number: int, words: Sequence[int]) -> None:
        """``kind`` is 1 to 255; words are int64."""
        if len(words) > _MOST - _HEAD:
            words = words[:_MOST - _HEAD]
        count = len(words) + _HEAD
        at = self._head % RING_WORDS
        if at + count > RING_WORDS:
            self._ring[at] = _SKIP
            self._head += RING_WORDS - at
            at = 0
        _packer(count)(self._bytes, 8 * at, count << 8 | kind, subject, number, *words)
        self._head += count
        self._cells[RING_HEAD] = self._head


class RingReader:
    """Another child's ring; ``apply`` takes its records by kind."""

    def __init__(self, board: Board, child: int, apply: dict[int, Apply]):
        self._ring = board.ring(child)
        self._cells = board.cells(child)
        self._apply = apply
        self._at = self._cells[RING_HEAD]

    def read(self) -> None:
        """Take in what is new."""
        head = self._cells[RING_HEAD]
        if head != self._at:
            self._read(head)

    def _read(self, head: int) -> None:
        ring, at = self._ring, self._at
        while at < head:
            if head - at > RING_WORDS // 2:  # Its writer is about to overtake us.
                break
            place = at % RING_WORDS
            first = ring[place]
            if first == _SKIP:
                at += RING_WORDS - place
                continue
            count, kind = first >> 8, first & 255
            if not _HEAD <= count <= min(_MOST, RING_WORDS - place):
                break
            words = ring[place + 1:place + count].tolist()
            apply = self._apply.get(kind)
            if apply is not None:
                apply(words[0], words[1], words[2:])
            at += count
        self._at = head
