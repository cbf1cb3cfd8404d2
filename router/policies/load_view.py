"""The least loaded workers, and how far loads differ, at a cost that does not grow with their number.

Up to EXACT_UP_TO workers all loads are read for every decision. More are sorted into levels of equal load, and a worker
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
"""Number of workers up to which all are compared for every decision (3 us for 64)."""
_MAX_COMPARED = 32
"""Number of the least loaded workers, where there are more, that are compared by their caches' sizes."""
_MAX_CACHED = 8
"""Tuples of workers that requests may alternate between: one for each kind of decode workers that coexist."""


class _Levels:
    """Workers by load. Those that changed their load last come last in their level, so equals take turns."""

    def __init__(self, workers: Sequence[Worker]):
        self._workers = workers
        self._levels: dict[int, dict[Worker, None]] = {}
        for worker in workers:
            self._levels.setdefault(worker.known_load, {})[worker] = None
            worker.load_orders += (self,)
        self.min_load, self.max_load = min(self._levels), max(self._levels)
        self.total = sum(worker.known_load for worker in workers)

    def close(self) -> None:
        """Follows the workers' loads no longer."""
        for worker in self._workers:
            worker.load_orders = tuple(order for order in worker.load_orders if order is not self)

    def load_changed(self, worker: Worker, before: int) -> None:
        levels, load = self._levels, worker.known_load
        self.total += load - before
        level = levels[before]
        del level[worker]
        levels.setdefault(load, {})[worker] = None
        if not level:
            del levels[before]
            self.min_load, self.max_load = min(levels), max(levels)  # Some dozens of levels at most.
        elif load < self.min_load:
            self.min_load = load
        elif load > self.max_load:
            self.max_load = load

    def least_loaded(self, slack: int) -> Iterator[Worker]:
        """Workers whose load is at most ``slack`` above the least, in ascending order."""
        levels = self._levels
        loads = range(self.min_load, self.min_load + slack + 1)
        return chain.from_iterable(levels[load] for load in loads if load in levels)

    def ascending(self) -> Iterator[Worker]:
        """All workers by load."""
        return chain.from_iterable(self._levels[load] for load in sorted(self._levels))


class LoadView:
    """Loads of the workers that a policy chooses among; ``refresh`` before each decision."""

    def __init__(self) -> None:
        self.min_load = 0
        self.max_load = 0
        self._workers: Sequence[Worker] = ()
        self._loads: list[int] = []
        self._levels: _Levels | None = None
        self._known: dict[int, tuple[Worker, ...]] = {}
        """Large tuples seen, by identity: the reference ensures that no other tuple gets the same id."""
        self._followed: dict[int, _Levels] = {}
        """The levels of those of them whose loads are followed."""

    @property
    def first(self) -> Worker:
        """The first of at most EXACT_UP_TO workers that has the least load."""
        return self._workers[self._loads.index(self.min_load)]

    @property
    def total(self) -> int:
        """Requests on all workers."""
        return sum(self._loads) if self._levels is None else self._levels.total

    def refresh(self, workers: Sequence[Worker]) -> None:
        """Reads the loads of ``workers`` (not empty)."""
        if workers is not self._workers:
            self._follow(workers)
        if self._levels is not None:
            self.min_load, self.max_load = self._levels.min_load, self._levels.max_load
            return
        self._loads = loads = [*map(by_load, workers)]
        self.min_load, self.max_load = min(loads), max(loads)

    def least_loaded(self, tie: Mapping[int, int], slack: int = 0) -> Worker:
        """Returns the worker with the least load, or at most ``slack`` more, whose id has the least value in ``tie``.

        Of many workers only some are compared.
        """
        if self._levels is not None:
            candidates = list(islice(self._levels.least_loaded(slack), _MAX_COMPARED))
        else:
            most = self.min_load + slack
            candidates = [worker for worker, load in zip(self._workers, self._loads) if load <= most]
        return candidates[0] if len(candidates) == 1 else min(candidates, key=lambda worker: tie.get(worker.id, 0))

    def next_least_loaded(self, workers: Sequence[Worker], number: int) -> Worker:
        """Refreshes, and returns the least loaded of ``workers`` (not empty); equals by ``number`` in rotation."""
        self.refresh(workers)
        if self._levels is not None:
            return next(self._levels.least_loaded(0))
        try:
            return workers[self._loads.index(self.min_load, number % len(workers))]
        except ValueError:
            return self.first

    def some_least_loaded(self, count: int, tie: Mapping[int, int]) -> list[Worker]:
        """Returns ``count`` of the least loaded workers; equals by the value of their ids in ``tie`` (of many workers
        only some are compared)."""
        some = self._workers if self._levels is None else islice(self._levels.ascending(), 4 * count)
        return nsmallest(count, some, key=lambda worker: (worker.known_load, tie.get(worker.id, 0)))

    def close(self) -> None:
        """Follows no loads any longer; the next ``refresh`` starts again."""
        self._workers, self._levels = (), None
        self._drop()
        self._known.clear()

    def _follow(self, workers: Sequence[Worker]) -> None:
        """Reads other workers from now on. A list is the workers that are left for one request's retry: its levels
        would not be used again."""
        self._workers = workers
        self._levels = (self._levels_of(workers) if isinstance(workers, tuple) and len(workers) > EXACT_UP_TO
                        else None)

    def _levels_of(self, workers: tuple[Worker, ...]) -> _Levels:
        """Several tuples are followed once one comes back, as where requests alternate between kinds of decode workers.
        A new tuple means that workers changed: the former levels would cost time with each change of a load, and are
        dropped."""
        key = id(workers)
        if key not in self._known:
            self._drop()
            if len(self._known) == _MAX_CACHED:
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
