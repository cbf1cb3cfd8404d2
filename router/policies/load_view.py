"""Who is lightest and how far loads lie apart, in microseconds for a thousand workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from ..registry import Worker
from .base import by_load

EXACT_UP_TO = 64
"""Workers that are all looked at for every decision (4 us for 64). Reading 1,000 loads takes 60 us."""


class LoadView:
    """Loads of the workers a policy chooses among; ``look`` before each decision.

    Beyond EXACT_UP_TO workers, ``least`` and ``most`` are up to n/4 decisions old, and the lightest
    workers come out of a queue that was sorted then; one that was loaded since is passed over.
    """

    def __init__(self) -> None:
        self.least = 0
        self.most = 0
        self._workers: Sequence[Worker] = ()
        self._loads: list[int] = []
        self._queue: deque[tuple[int, Worker]] = deque()
        self._until_scan = 0

    def look(self, workers: Sequence[Worker]) -> None:
        """Take in the loads of ``workers`` (not empty)."""
        self._until_scan -= 1
        if self._until_scan < 0 or workers is not self._workers:
            self._workers = workers
            self._scan()

    def lightest(self, tie: Mapping[int, int]) -> Worker:
        """The worker with the least load; of equals the one for whose id ``tie`` holds the least."""
        if len(self._workers) <= EXACT_UP_TO:
            least = self.least
            light = [worker for worker, load in zip(self._workers, self._loads) if load == least]
            return light[0] if len(light) == 1 else min(light, key=lambda worker: tie.get(worker.id, 0))
        for _ in range(2):
            while self._queue:
                load, worker = self._queue.popleft()
                if worker.load <= load:
                    return worker
            self._scan()
            self._line_up(tie)
        raise AssertionError("a queue was empty right after it was filled")

    def _scan(self) -> None:
        self._loads = loads = [*map(by_load, self._workers)]
        self.least, self.most = min(loads), max(loads)
        self._queue.clear()
        self._until_scan = len(loads) // 4 if len(loads) > EXACT_UP_TO else 0

    def _line_up(self, tie: Mapping[int, int]) -> None:
        """Queue the lighter quarter, in order."""
        order = sorted(self._workers, key=lambda worker: (worker.load, tie.get(worker.id, 0)))
        self._queue.extend((worker.load, worker) for worker in order[:len(order) // 4])
