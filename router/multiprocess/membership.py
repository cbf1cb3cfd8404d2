"""The parent's workers, the updates that it sends to children, and the rows of shared memory that count requests."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from ...common.api.errors import Conflict
from ..config.circuit import CircuitRules
from ..workers.models import Models
from ..workers.registry import Registry, Worker
from .messages import WorkerUpdate, WorkerUpdates
from .shared_stats import MAX_WORKERS, SharedStats


class ReplicatedRegistry(Registry):
    """The parent's registry. ``on_drain`` is called when a worker begins to drain: its requests are in other
    processes, so the caller finds out when the last of them has ended."""

    def __init__(self, *, failure_threshold: int, success_threshold: int, circuit_rules: CircuitRules,
                 on_drain: Callable[[], None], models: Models | None = None):
        super().__init__(failure_threshold=failure_threshold, success_threshold=success_threshold,
                         circuit_rules=circuit_rules, models=models)
        self._on_drain = on_drain

    def add(self, worker: Worker) -> None:
        if len(self) >= MAX_WORKERS // 2:  # As many may have left whose requests still run.
            raise Conflict(f"A router of several processes has at most {MAX_WORKERS // 2} workers.")
        super().add(worker)

    def drain(self, url: str) -> Worker:
        """Takes a worker out of new decisions. Raises NotFound."""
        worker = self.get(url)
        worker.draining = True
        self.rebuild()
        self._on_drain()
        return worker

    def by_id(self, worker_id: int) -> Worker | None:
        return next((worker for worker in self if worker.id == worker_id), None)


class Rows:
    """Rows of shared memory by worker: each counts one worker's requests."""

    def __init__(self, stats: SharedStats):
        self._stats = stats
        self._rows: dict[int, int] = {}
        self._free = list(range(MAX_WORKERS))
        self._retired: list[tuple[int, int]] = []
        """Version of the update from which on no child sends requests there, and row: free when the last has ended."""

    def __getitem__(self, worker_id: int) -> int:
        """The row of a worker, its own from now on."""
        row = self._rows.get(worker_id)
        if row is None:
            row = self._rows[worker_id] = heapq.heappop(self._free)
        return row

    def retire(self, worker_id: int, version: int) -> None:
        """Takes the row of a worker that left in update ``version``."""
        self._retired.append((version, self._rows.pop(worker_id)))

    def reclaim(self, applied: int) -> None:
        """Frees retired rows without requests; all children have applied the updates up to ``applied``."""
        still_used = []
        for version, row in self._retired:
            if version <= applied and not self._stats.total(row):
                heapq.heappush(self._free, row)
            else:
                still_used.append((version, row))
        self._retired = still_used

    def load(self, worker_id: int) -> int:
        row = self._rows.get(worker_id)
        return 0 if row is None else self._stats.total(row)


class UpdateFeed:
    """The state of the workers that children were sent, and the next update: all that differs from it."""

    def __init__(self, registry: Registry, rows: Rows):
        self._registry = registry
        self._rows = rows
        self._sent: dict[int, WorkerUpdate] = {}
        self._repeated: set[int] = set()
        self.version = 0
        self.to_cut: set[int] = set()
        """Ids of workers whose requests are cut when they leave."""

    def next_update(self) -> WorkerUpdates | None:
        """Returns the changes since the last call; None when there are none."""
        now = {state.id: state for state in self._current()}
        changed = tuple(state for state in now.values()
                        if state.id in self._repeated or self._sent.get(state.id) != state)
        removed = tuple(self._sent.keys() - now.keys())
        if not changed and not removed:
            return None
        self.version += 1
        for worker_id in removed:
            self._rows.retire(worker_id, self.version)
        cut = tuple(self.to_cut.intersection(removed))
        self.to_cut.clear()
        self._repeated.clear()
        self._sent = now
        return WorkerUpdates(self.version, changed, removed, cut)

    def snapshot(self) -> WorkerUpdates:
        """All workers, for a new child. All others must have been sent ``next_update`` before."""
        return WorkerUpdates(self.version, tuple(self._sent.values()))

    def repeat(self, worker_id: int) -> None:
        """Puts a worker into the next update though it did not change: a child may have changed it."""
        self._repeated.add(worker_id)

    def _current(self) -> Iterator[WorkerUpdate]:
        for worker in self._registry:
            circuit = worker.circuit
            yield WorkerUpdate(
                worker.id, self._rows[worker.id], worker.endpoint.url, worker.rank, worker.root.id, worker.api_key,
                circuit=circuit.state, troubled=circuit.troubled, probing=circuit.probing,
                **{name: getattr(worker, name) for name in WorkerUpdate.worker_fields})
