"""The virtual clock: events in the order of their times, equal ones in the order in which they were added."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    """Runs callbacks at their times, in seconds. ``now`` is the time of the one that runs."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_run = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call ``call(*arguments)`` at ``time``, now at the earliest."""
        self._count += 1
        heapq.heappush(self._heap, (time if time > self.now else self.now, self._count, call, arguments))

    def run(self, until: float = float("inf")) -> None:
        """Run events until none is left, or none before ``until``."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(heap)
            self.num_run += 1
            call(*arguments)
