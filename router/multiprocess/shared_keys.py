"""The shares of API keys over all processes of a router: each key's running requests, and the level of its bucket.

A key has a row of the shared memory, which passes to another key once nothing of the first needs to be remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

from ..admission.limits import TokenBucket
from .shared_stats import MAX_KEYS, SharedCount, SharedStats


class SharedKeyShare:
    """One API key's share over all processes."""

    __slots__ = ("bucket", "_count")

    def __init__(self, running: SharedCount, bucket: TokenBucket | None):
        self._count = running
        self.bucket: TokenBucket | None = bucket

    @property
    def running(self) -> int:
        return self._count.value

    @running.setter
    def running(self, running: int) -> None:
        self._count.value = running


class KeyTable:
    """The keys' rows in shared memory, by digest; to be used under the lock only."""

    def __init__(self, stats: SharedStats, child: int, rate: float):
        self._stats = stats
        self._child = child
        self._rate = rate
        self._columns: Sequence[memoryview] = [stats.key_running(other) for other in range(stats.count)]
        self._rows: dict[bytes, tuple[int, int]] = {}
        """Digest and row of each key seen; a row may have passed to another key since."""

    def find(self, key: bytes, now: float) -> SharedKeyShare | None:
        """The key's share; None when there is no row for one more key."""
        digest, row = self._rows.get(key) or (self._digest(key), -1)
        if row < 0 or self._stats.digests[row] != digest:
            known = self._find_row(digest)
            if known is None:
                known = self._find_row(0)
                if known is None and self._free_rows(now):
                    known = self._find_row(0)
                if known is None:
                    return None
                self._stats.digests[known] = digest
                self._stats.key_levels[2 * known + 1] = 0.0
            row = known
            if len(self._rows) >= MAX_KEYS:
                self._rows.clear()
            self._rows[key] = digest, row
        return self._share(row, now)

    def _share(self, row: int, now: float) -> SharedKeyShare:
        levels = self._stats.key_levels
        bucket = TokenBucket(self._rate, now, levels[2 * row:2 * row + 2]) if self._rate else None
        return SharedKeyShare(SharedCount(self._columns, self._child, row), bucket)

    def _digest(self, key: bytes) -> int:
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little", signed=True) or 1

    def _find_row(self, digest: int) -> int | None:
        start, end = self._stats.digests_at
        at, pattern = start, digest.to_bytes(8, "little", signed=True)
        while (at := self._stats.memory.find(pattern, at, end)) >= 0:
            if not (at - start) % 8:
                return (at - start) // 8
            at += 1
        return None

    def _free_rows(self, now: float) -> bool:
        """Forgets keys that have nothing running and a full bucket; returns whether there were any."""
        freed = False
        for row in range(MAX_KEYS):
            share = self._share(row, now)
            if not share.running and (share.bucket is None or share.bucket.full(now)):
                self._stats.digests[row] = 0
                freed = True
        return freed
