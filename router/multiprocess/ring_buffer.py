"""Ring buffers in shared memory: the records that each child publishes to the others.

A record is ``[length and kind, subject, number, words...]``: of a prefix memory the worker's id, the memory's capacity
and the blocks' hashes. The writer publishes its position, in words ever written, after the record. A reader that was
overtaken skips to it: what it missed costs a cache hit. So would a word read while it was written, which
processors that reorder stores allow: words are only ever looked up, never trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

from ..policies.base import Apply
from .shared_stats import RING_HEAD, RING_WORDS, SharedStats

_HEADER_WORDS = 3
_KIND_BITS = 32
_KIND = 2**_KIND_BITS - 1
_MAX_RECORD_WORDS = RING_WORDS // 8
"""The end of a longer record is left out."""
_SKIP = 0
"""A first word that says: the next record is at the ring's beginning."""


@lru_cache(1024)
def words(count: int) -> struct.Struct:
    """``count`` int64 words in a row."""
    return struct.Struct(f"{count}q")


class RingWriter:
    """The ring buffer of this process."""

    def __init__(self, stats: SharedStats, child: int):
        self._words = stats.ring(child)
        self._cells = stats.cells(child)
        self._position = self._cells[RING_HEAD]

    def write(self, kind: int, subject: int, number: int, content: Sequence[int]) -> None:
        """Publishes a record; ``kind`` is 1 to 2**32 - 1, ``content`` is int64 words."""
        if len(content) > _MAX_RECORD_WORDS - _HEADER_WORDS:
            content = content[:_MAX_RECORD_WORDS - _HEADER_WORDS]
        count = len(content) + _HEADER_WORDS
        at = self._position % RING_WORDS
        if at + count > RING_WORDS:
            self._words[at] = _SKIP
            self._position += RING_WORDS - at
            at = 0
        words(count).pack_into(self._words, 8 * at, count << _KIND_BITS | kind, subject, number, *content)
        self._position += count
        self._cells[RING_HEAD] = self._position


class RingReader:
    """Another child's ring buffer, read up to ``position``; ``apply`` takes its records by kind."""

    def __init__(self, stats: SharedStats, child: int):
        self._words = stats.ring(child)
        self.position = stats.cells(child)[RING_HEAD]
        self.apply: dict[int, Apply] = {}

    def read(self, head: int) -> None:
        """Applies what is new, up to the writer's position ``head``."""
        at, self.position = self.position, head
        while at < head:
            if head - at > RING_WORDS // 2:  # Its writer is about to overtake us.
                return
            offset = at % RING_WORDS
            chunk = self._words[offset:offset + head - at].tolist()  # Up to the ring's end; it ends with a record.
            at += len(chunk)
            start, end = 0, len(chunk)
            while start < end:
                first = chunk[start]
                stop = start + (first >> _KIND_BITS)
                if stop < start + _HEADER_WORDS:  # The rest of the ring was skipped, or this was overwritten.
                    break
                apply = self.apply.get(first & _KIND)
                if apply is not None:
                    apply(chunk[start + _HEADER_WORDS:stop], chunk[start + 1], chunk[start + 2])
                start = stop
