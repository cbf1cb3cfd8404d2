"""The lightest workers and how far loads lie apart, at a cost that does not grow with their number.

Up to EXACT_UP_TO workers all loads are read for every decision. More are kept in levels of equal load, and a worker
changes its level when its load changes: a decision among 1,000 then takes as long as one among 64, where reading
all loads takes 30 us.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import nsmallest
from itertools import chain, islice

from ..workers.registry import Worker
from .base import by_load

EXACT_UP_TO = 64
"""Workers that are all looked at for every decision (3 us for 64)."""
_COMPARED = 32
"""Workers of a large fleet that are compared by their caches' sizes: the first of the lightest."""
_REMEMBERED = 8
"""Tuples of workers that requests may alternate between: one for each kind of decode workers that coexist."""


class _Levels:
    """Workers by load. Those that changed their load last come last in their level, so equals take turns."""

    def __init__(self, workers: Sequence[Worker]):
        self._workers = workers
        self._levels: dict[int, dict[Worker, None]] = {}
        for worker in workers:
            self._levels.setdefault(worker.known_load, {})[worker] = None
            worker.load_orders += (self,)
        self.least, self.most = min(self._levels), max(self._levels)
        self.total = sum(worker.known_load for worker in workers)

    def close(self) -> None:
        """Follow the workers no longer."""
        for worker in self._workers:
            worker.load_orders = tuple(order for order in worker.load_orders if order is not self)

    def moved(self, worker: Worker, before: int) -> None:
        levels, load = self._levels, worker.known_load
        self.total += load - before
        level = levels[before]
        del level[worker]
        levels.setdefault(load, {})[worker] = None
        if not level:
            del levels[before]
            self.least, self.most = min(levels), max(levels)  # Some dozens of levels at most.
        elif load < self.least:
            self.least = load
        elif load > self.most:
            self.most = load

    def lightest(self, slack: int) -> Iterator[Worker]:
        """Workers whose load is at most ``slack`` above the least, the lightest first."""
        levels = self._levels
        loads = range(self.least, self.least + slack + 1)
        return chain.from_iterable(levels[load] for load in loads if load in levels)

    def ascending(self) -> Iterator[Worker]:
        """All workers by load."""
        return chain.from_iterable(self._levels[load] for load in sorted(self._levels))


class LoadView:
    """Loads of the workers that a policy chooses among; ``look`` before each decision."""

    def __init__(self) -> None:
        self.least = 0
        self.most = 0
        self._workers: Sequence[Worker] = ()
        self._loads: list[int] = []
        self._levels: _Levels | None = None
        self._known: dict[int, tuple[Worker, ...]] = {}
        """Large fleets that were looked at, by identity: they are kept, so that an id is not another's."""
        self._followed: dict[int, _Levels] = {}
        """Those of them whose levels are kept up to date."""

    @property
    def first(self) -> Worker:
        """The first of at most EXACT_UP_TO workers that has the least load."""
        return self._workers[self._loads.index(self.least)]

    @property
    def total(self) -> int:
        """Requests on all workers."""
        return sum(self._loads) if self._levels is None else self._levels.total

    def look(self, workers: Sequence[Worker]) -> None:
        """Take in the loads of ``workers`` (not empty)."""
        if workers is not self._workers:
            self._follow(workers)
        if self._levels is not None:
            self.least, self.most = self._levels.least, self._levels.most
            return
        self._loads = loads = [*map(by_load, workers)]
        self.least, self.most = min(loads), max(loads)

    def lightest(self, tie: Mapping[int, int], slack: int = 0) -> Worker:
        """Of the workers with the least load, or at most ``slack`` more, the one for whose id ``tie`` holds the least.

        Of a large fleet only some are compared.
        """
        if self._levels is not None:
            light = list(islice(self._levels.lightest(slack), _COMPARED))
        else:
            most = self.least + slack
            light = [worker for worker, load in zip(self._workers, self._loads) if load <= most]
        return light[0] if len(light) == 1 else min(light, key=lambda worker: tie.get(worker.id, 0))

    def next_lightest(self, workers: Sequence[Worker], turn: int) -> Worker:
        """Of ``workers`` (not empty), which are looked at first, the one with the least load; equals take turns."""
        self.look(workers)
        if self._levels is not None:
            return next(self._levels.lightest(0))
        try:
            return workers[self._loads.index(self.least, turn % len(workers))]
        except ValueError:
            return self.first

    def light(self, count: int, tie: Mapping[int, int]) -> list[Worker]:
        """``count`` of the lightest workers; equals by what ``tie`` holds for their ids (some of them, of many)."""
        some = self._workers if self._levels is None else islice(self._levels.ascending(), 4 * count)
        return nsmallest(count, some, key=lambda worker: (worker.known_load, tie.get(worker.id, 0)))

    def close(self) -> None:
        """Follow nobody any longer; the next ``look`` begins anew."""
        self._workers, self._levels = (), None
        self._drop()
        self._known.clear()

    def _follow(self, workers: Sequence[Worker]) -> None:
        """A list is the workers left for one request's retry: its levels would not be asked again."""
        self._workers = workers
        large = len(workers) > EXACT_UP_TO and isinstance(workers, tuple)
        self._levels = self._levels_of(workers) if large else None  # type: ignore[arg-type]

    def _levels_of(self, workers: tuple[Worker, ...]) -> _Levels:
        """Several are kept once one comes back, as where requests alternate between kinds of decode workers. A tuple
        that was never seen says that workers changed: the former levels would cost time with each load that changes,
        and are dropped."""
        key = id(workers)
        if key not in self._known:
            self._drop()
            if len(self._known) == _REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[key] = workers
        levels = self._followed.get(key)
        if levels is None:
            levels = self._followed[key] = _Levels(workers)
        return levels

    def _drop(self) -> None:
        for levels in self._followed.values():
            levels.close()
        self._followed.clear()
