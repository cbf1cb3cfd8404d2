"""The keys of a tier that may be evicted, in the order of an eviction policy; all calls take many keys at once.

By recency alone, the default, a key costs a few operations of an ordered dict: host memory takes in and evicts
thousands of pages a second on the loop's thread. Other policies go by each key's Usage.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from typing import Protocol

from ..eviction.base import EvictionOrder, EvictionQueue, Usage
from ..eviction.lru import LeastRecentlyUsed
from ..page_keys import PageKey


class EvictableKeys(Protocol):
    """Keys of kept pages. Those that are *out* are not evicted. Among keys of equal usage, which are those of one
    prompt, the last page goes first: the others are of use without it."""

    def __len__(self) -> int:
        """Keys that may be evicted."""

    def __contains__(self, key: PageKey) -> bool:
        """True where ``key`` may be evicted."""

    def add(self, keys: Sequence[PageKey]) -> None:
        """Adds new keys, used now."""

    def touch(self, keys: Sequence[PageKey]) -> None:
        """Records that kept keys, out or not, are used now."""

    def count_use(self, keys: Sequence[PageKey]) -> None:
        """Counts one more request that reads kept keys."""

    def take_out(self, keys: Iterable[PageKey]) -> None:
        """Keeps keys from eviction."""

    def put_back(self, keys: Iterable[PageKey]) -> None:
        """Lets kept keys be evicted again."""

    def forget(self, keys: Iterable[PageKey]) -> None:
        """Removes keys, out or not."""

    def next(self, count: int, keep: Container[PageKey]) -> list[PageKey]:
        """The ``count`` keys that are evicted first, or all there are, without those of ``keep``; they are out now."""
        ...


def evictable_keys(order: EvictionOrder | None) -> EvictableKeys:
    """Makes the queue of a policy, by default LRU."""
    return RecentKeys() if order is None or isinstance(order, LeastRecentlyUsed) else RankedKeys(order)


class RecentKeys:
    """Keys in the order of their last use."""

    def __init__(self) -> None:
        self._keys: OrderedDict[PageKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._keys

    def add(self, keys: Sequence[PageKey]) -> None:
        self._keys.update(dict.fromkeys(reversed(keys)))

    def touch(self, keys: Sequence[PageKey]) -> None:
        there, to_end = self._keys, self._keys.move_to_end
        for key in reversed(keys):
            if key in there:
                to_end(key)

    def count_use(self, keys: Sequence[PageKey]) -> None:
        """Recency counts no uses."""

    def take_out(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    def put_back(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)

    def forget(self, keys: Iterable[PageKey]) -> None:
        self.take_out(keys)

    def next(self, count: int, keep: Container[PageKey]) -> list[PageKey]:
        found: list[PageKey] = []
        kept: list[PageKey] = []
        first = self._keys.popitem
        while len(found) < count and self._keys:
            key = first(False)[0]
            (kept if key in keep else found).append(key)
        self.put_back(kept)
        return found


class RankedKeys:
    """Keys in the order of a policy that goes by more than recency."""

    def __init__(self, order: EvictionOrder) -> None:
        self._usage: dict[PageKey, Usage] = {}
        self._queue: EvictionQueue[PageKey] = EvictionQueue(order)
        self._clock = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, key: PageKey) -> bool:
        return key in self._queue

    def add(self, keys: Sequence[PageKey]) -> None:
        self._clock += 1
        for key in reversed(keys):
            self._usage[key] = usage = Usage(self._clock)
            self._queue.put(key, usage)

    def touch(self, keys: Sequence[PageKey]) -> None:
        self._clock += 1
        for key in reversed(keys):
            usage = self._usage[key]
            usage.last_used = self._clock
            if key in self._queue:
                self._queue.put(key, usage)

    def count_use(self, keys: Sequence[PageKey]) -> None:
        for key in keys:
            self._usage[key].num_uses += 1

    def take_out(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._queue.discard(key)

    def put_back(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            self._queue.put(key, self._usage[key])

    def forget(self, keys: Iterable[PageKey]) -> None:
        for key in keys:
            del self._usage[key]
            self._queue.discard(key)

    def next(self, count: int, keep: Container[PageKey]) -> list[PageKey]:
        found: list[PageKey] = []
        kept: list[PageKey] = []
        while len(found) < count and self._queue:
            key = self._queue.pop()
            (kept if key in keep else found).append(key)
        self.put_back(kept)
        return found
