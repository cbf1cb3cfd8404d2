"""What an eviction policy sees of cached pages, and the queue that keeps them in its order.

Nothing here reads a clock: uses are counted, so that the ranks of a tensor-parallel group evict the same pages.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ...api.errors import ConfigError
from ...config.rules import json_object
from ...config.server.cache import EVICTION_POLICIES

T = TypeVar("T", bound=Hashable)

Rank = tuple[int, ...]
"""Sorts by eviction: the smallest goes first. All ranks of one order have the same length."""


@dataclass(slots=True)
class Usage:
    """The uses of one item of a cache: an edge of the prefix cache, or a page in host memory.

    ``last_used`` counts up with every use of the cache. ``num_uses``: requests that read it, the one that computed it
    included. ``priority``: the most urgent of these, larger first. ``begin``: tokens of the prompt before it;
    ``history``: tokens of the longest conversation that ever went through it, cached or not.
    """

    last_used: int = 0
    num_uses: int = 1
    priority: int = 0
    begin: int = 0
    history: int = 0

    def copy(self) -> Usage:
        return Usage(self.last_used, self.num_uses, self.priority, self.begin, self.history)


class EvictionOrder(Protocol):
    """An eviction policy. Its constructor's parameters, in tokens or uses, are the keys of
    ``--radix-eviction-policy-config``; it raises ConfigError for values that make no sense."""

    def rank(self, usage: Usage) -> Rank: ...


class EvictionQueue(Generic[T]):
    """Items that may be evicted, in the order of a policy; every call takes the logarithm of their number.

    A use that moves an item back is noticed when its turn comes. After one that can move it forward ``put`` is called
    again.
    """

    def __init__(self, order: EvictionOrder):
        self._rank = order.rank
        self._heap: list[tuple[Rank, int, T]] = []
        self._queued: dict[T, tuple[int, Usage]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, item: T) -> bool:
        return item in self._queued

    def put(self, item: T, usage: Usage) -> None:
        """Add an item, or give it the place that its ``usage`` says now; the queue reads the object again later."""
        self._count += 1
        self._queued[item] = self._count, usage
        heapq.heappush(self._heap, (self._rank(usage), self._count, item))
        if len(self._heap) > 2 * len(self._queued) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)

    def discard(self, item: T) -> None:
        """Remove an item, if it is in the queue."""
        self._queued.pop(item, None)

    def pop(self) -> T:
        """Remove the item that is evicted first, and return it; raises IndexError where there is none."""
        while True:
            entry = heapq.heappop(self._heap)
            if not self._is_current(entry):
                continue
            rank, number, item = entry
            now = self._rank(self._queued[item][1])
            if now <= rank:
                del self._queued[item]
                return item
            heapq.heappush(self._heap, (now, number, item))

    def clear(self) -> None:
        self._heap.clear()
        self._queued.clear()

    def _is_current(self, entry: tuple[Rank, int, T]) -> bool:
        queued = self._queued.get(entry[2])
        return queued is not None and queued[0] == entry[1]


def make_order(policy: str, config: str) -> EvictionOrder:
    """The order of ``--radix-eviction-policy`` with the JSON object of ``--radix-eviction-policy-config``; raises
    ConfigError."""
    values: dict[str, Any] = json_object("--radix-eviction-policy-config", config)
    make = EVICTION_POLICIES.get(policy)
    known: set[str] = {*getattr(make, "__dataclass_fields__", ())}
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"--radix-eviction-policy {policy} has no setting {unknown[0]!r}" +
                          (f", only {' and '.join(sorted(known))}." if known else ": leave it out."))
    if wrong := sorted(key for key, value in values.items() if type(value) is not int or value < 0):
        raise ConfigError(f"{wrong[0]!r} of --radix-eviction-policy-config must be a number from 0 on, not "
                          f"{values[wrong[0]]!r}.")
    order: EvictionOrder = make(**values)
    return order
