"""The workers as all children are to know them: rows of the board, and news for whoever lacks them."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from ...common.api.errors import Conflict
from ..workers.circuit import CircuitRules
from ..workers.models import Models
from ..workers.registry import Registry, Worker
from .messages import Updates, WorkerUpdate
from .shared_stats import MOST_WORKERS, SharedStats


class ReplicatedRegistry(Registry):
    """The parent's registry: ``changed`` is called after each change, ``draining`` when a worker begins to drain."""

    def __init__(self, *, failure_threshold: int, success_threshold: int, circuit_rules: CircuitRules,
                 changed: Callable[[], None], draining: Callable[[], None], models: Models | None = None):
        self._changed: Callable[[], None] = lambda: None
        super().__init__(failure_threshold=failure_threshold, success_threshold=success_threshold,
                         circuit_rules=circuit_rules, models=models)
        self._changed = changed
        self._draining = draining

    def add(self, worker: Worker) -> None:
        if len(self) >= MOST_WORKERS // 2:  # As many may have left whose requests still run.
            raise Conflict(f"A router of several processes has at most {MOST_WORKERS // 2} workers.")
        super().add(worker)

    def drain(self, url: str) -> Worker:
        """Take a worker out of new decisions; when it has nothing left in any process is for others to see."""
        worker = self.get(url)
        worker.draining = True
        self.changed()
        self._draining()
        return worker

    def by_id(self, worker_id: int) -> Worker | None:
        return next((worker for worker in self if worker.id == worker_id), None)

    def _refresh(self) -> None:
        super()._refresh()
        self._changed()


class Rows:
    """Which row of the board counts which worker's requests."""

    def __init__(self, board: SharedStats):
        self._board = board
        self._rows: dict[int, int] = {}
        self._free = list(range(MOST_WORKERS))
        self._left: list[tuple[int, int]] = []
        """Version from which on nobody places requests there, and row: free when the last request has ended."""

    def __getitem__(self, worker_id: int) -> int:
        """The row of a worker, its own from now on."""
        row = self._rows.get(worker_id)
        if row is None:
            row = self._rows[worker_id] = heapq.heappop(self._free)
        return row

    def leave(self, worker_id: int, version: int) -> None:
        self._left.append((version, self._rows.pop(worker_id)))

    def reclaim(self, known: int) -> None:
        """Free the rows that nobody uses any more; all children have taken in the news up to ``known``."""
        kept = []
        for version, row in self._left:
            if version <= known and not self._board.total(row):
                heapq.heappush(self._free, row)
            else:
                kept.append((version, row))
        self._left = kept

    def load(self, worker_id: int) -> int:
        row = self._rows.get(worker_id)
        return 0 if row is None else self._board.total(row)


class UpdateFeed:
    """What the children were told of the workers; ``news`` is what they were not."""

    def __init__(self, registry: Registry, rows: Rows):
        self._registry = registry
        self._rows = rows
        self._told: dict[int, WorkerUpdate] = {}
        self._again: set[int] = set()
        self.version = 0
        self.to_cut: set[int] = set()
        """Ids of workers whose requests are cut when they leave."""

    def news(self) -> Updates | None:
        """What changed since the last call; None when nothing did."""
        now = {news.id: news for news in self._current()}
        changed = tuple(news for news in now.values() if news.id in self._again or self._told.get(news.id) != news)
        gone = tuple(self._told.keys() - now.keys())
        if not changed and not gone:
            return None
        self.version += 1
        for worker_id in gone:
            self._rows.leave(worker_id, self.version)
        cut = tuple(self.to_cut.intersection(gone))
        self.to_cut.clear()
        self._again.clear()
        self._told = now
        return Updates(self.version, changed, gone, cut)

    def all(self) -> Updates:
        """For a child that knows nothing yet. ``news`` must have been told to all others before."""
        return Updates(self.version, tuple(self._told.values()))

    def repeat(self, worker_id: int) -> None:
        """Tell of a worker again: a child may take it for something else."""
        self._again.add(worker_id)

    def _current(self) -> Iterator[WorkerUpdate]:
        for worker in self._registry:
            circuit = worker.circuit
            yield WorkerUpdate(
                worker.id, self._rows[worker.id], worker.endpoint.url, worker.rank, worker.root.id, worker.api_key,
                circuit=circuit.state, troubled=circuit.troubled, probing=circuit.probing,
                **{name: getattr(worker, name) for name in WorkerUpdate.of_worker})

