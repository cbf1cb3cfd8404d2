"""Who is lightest and how far loads lie apart, in microseconds for a thousand workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from operator import attrgetter

from ..registry import Worker
from .base import by_load

EXACT_UP_TO = 64
"""Workers that are all looked at for every decision (4 us for 64). Reading 1,000 loads takes 60 us."""
_WINDOW = 32
"""Workers that are looked at together beyond that: about the root of a thousand."""

_by_least = attrgetter("least")
_by_total = attrgetter("total")


class _Window:
    """Some of the workers, as they were at the last ``scan``."""

    __slots__ = ("workers", "loads", "least", "most", "total")

    def __init__(self, workers: Sequence[Worker]):
        self.workers = workers
        self.scan()

    def scan(self) -> None:
        self.loads = loads = [*map(by_load, self.workers)]
        self.least, self.most, self.total = min(loads), max(loads), sum(loads)

    def lightest(self, tie: Mapping[int, int], slack: int = 0) -> Worker:
        most = self.least + slack
        light = [worker for worker, load in zip(self.workers, self.loads) if load <= most]
        return light[0] if len(light) == 1 else min(light, key=lambda worker: tie.get(worker.id, 0))


class LoadView:
    """Loads of the workers a policy chooses among; ``look`` before each decision.

    Beyond EXACT_UP_TO workers each ``look`` reads one window of them in turn, so that ``least`` and ``most`` are up
    to n/32 decisions old; a window is read again before a worker out of it is named the lightest. No decision pays
    for all workers: one in a hundred that did would be the 99th percentile.
    """

    def __init__(self) -> None:
        self.least = 0
        self.most = 0
        self._workers: Sequence[Worker] = ()
        self._windows: list[_Window] = []
        self._turn = 0

    @property
    def first(self) -> Worker:
        """The first of at most EXACT_UP_TO workers that has the least load."""
        (window,) = self._windows
        return window.workers[window.loads.index(self.least)]

    @property
    def total(self) -> int:
        """Requests on all workers."""
        if len(self._windows) == 1:
            return sum(self._windows[0].loads)
        return sum(map(_by_total, self._windows))

    def look(self, workers: Sequence[Worker]) -> None:
        """Take in the loads of ``workers`` (not empty)."""
        if workers is self._workers and len(self._windows) == 1:
            window = self._windows[0]
            window.loads = loads = [*map(by_load, workers)]
            self.least = window.least = min(loads)
            self.most = window.most = max(loads)
            return
        if workers is not self._workers:
            self._workers = workers
            size = len(workers) if len(workers) <= EXACT_UP_TO else _WINDOW
            self._windows = [_Window(workers[start:start + size]) for start in range(0, len(workers), size)]
        else:
            self._turn = (self._turn + 1) % len(self._windows)
            self._windows[self._turn].scan()
        self.least = min(map(_by_least, self._windows))
        self.most = max(window.most for window in self._windows)

    def lightest(self, tie: Mapping[int, int], slack: int = 0) -> Worker:
        """Of the workers with the least load, or at most ``slack`` more, the one for whose id ``tie`` holds the least.

        Of a large fleet only those of one window are compared.
        """
        if len(self._windows) == 1:
            return self._windows[0].lightest(tie, slack)
        turned = self._windows[self._turn:] + self._windows[:self._turn]  # Equals take turns.
        while True:
            window = min(turned, key=_by_least)
            before = window.least
            window.scan()
            if window.least <= before:
                return window.lightest(tie, slack)

    def light(self, count: int, tie: Mapping[int, int]) -> list[Worker]:
        """``count`` of the lightest workers, no two of one window (all of them, where they make one window)."""
        if len(self._windows) == 1:
            return nsmallest(count, self._workers, key=by_load)
        return [window.lightest(tie) for window in nsmallest(count, self._windows, key=_by_least)]
