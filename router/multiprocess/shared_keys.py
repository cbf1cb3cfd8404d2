"""The shares of API keys, over all processes of a router: what each has running, and the level of its bucket.

A key has a row on the board, which passes to another key once it holds nothing that would be missed.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ..admission.admission import TokenBucket, _Key
from .shared_bucket import SharedBucket
from .shared_stats import MOST_KEYS, SharedCount, SharedStats


class SharedKey(_Key):
    """One API key's share, over all processes."""

    __slots__ = ("_count",)

    def __init__(self, running: SharedCount, bucket: TokenBucket | None):
        self._count = running
        self.bucket = bucket

    def _get_running(self) -> int:
        return self._count.value

    def _set_running(self, running: int) -> None:
        self._count.value = running

    running = property(_get_running, _set_running)  # type: ignore[assignment]


class KeyTable:
    """The keys' rows on the board, found by digest. Only for the holder of the lock."""

    def __init__(self, board: SharedStats, child: int, rate: float):
        self._board = board
        self._child = child
        self._rate = rate
        self._columns: Sequence[memoryview] = [board.key_running(other) for other in range(board.count)]
        self._rows: dict[bytes, tuple[int, int]] = {}
        """Digest and row of each key seen; a row may have passed to another key since."""

    def find(self, key: bytes, now: float) -> SharedKey | None:
        """The key's share; None when there is no room for one more key."""
        digest, row = self._rows.get(key) or (self._digest(key), -1)
        if row < 0 or self._board.digests[row] != digest:
            found = self._look_up(digest)
            if found is None:
                found = self._look_up(0)
                if found is None and self._make_room(now):
                    found = self._look_up(0)
                if found is None:
                    return None
                self._board.digests[found] = digest
                self._board.key_levels[2 * found + 1] = 0.0
            row = found
            if len(self._rows) >= MOST_KEYS:
                self._rows.clear()
            self._rows[key] = digest, row
        return self._share(row, now)

    def _share(self, row: int, now: float) -> SharedKey:
        bucket = SharedBucket(self._rate, now, self._board.key_levels, 2 * row) if self._rate else None
        return SharedKey(SharedCount(self._columns, self._child, row), bucket)

    def _digest(self, key: bytes) -> int:
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little", signed=True) or 1

    def _look_up(self, digest: int) -> int | None:
        start, end = self._board.digests_at
        at, wanted = start, digest.to_bytes(8, "little", signed=True)
        while (at := self._board.memory.find(wanted, at, end)) >= 0:
            if not (at - start) % 8:
                return (at - start) // 8
            at += 1
        return None

    def _make_room(self, now: float) -> bool:
        """Forget keys that have nothing running and a full bucket; returns whether there were any."""
        freed = False
        for row in range(MOST_KEYS):
            share = self._share(row, now)
            if not share.running and (share.bucket is None or share.bucket.full(now)):
                self._board.digests[row] = 0
                freed = True
        return freed
