"""The workers as a child sees them: what the parent told of each, and loads over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter

from ..circuit import CircuitRules
from ..endpoint import Endpoint
from ..registry import Registry, Reservation, Role, Worker
from .board import Board
from .messages import Failed, Probed, Served, WorkerNews

_STEP = 32
"""Rows that are compared at once: of a thousand workers only those whose neighbours changed are walked."""


class SharedWorker(Worker):
    """A worker whose ``load`` is over all processes: as of the last ``Loads.refresh``, and this process's own since.

    What is added to it, or taken away, goes to this process's column of the board.
    """

    __slots__ = ("row", "_load", "_column")

    def __init__(self, endpoint: Endpoint, role: Role, *, api_key: str | None, rank: int | None, root: Worker | None,
                 row: int, column: memoryview):
        self.row = row
        self._load = 0
        self._column = column
        super().__init__(endpoint, role, api_key=api_key, rank=rank, root=root)

    def _set_load(self, load: int) -> None:
        self._column[self.row] += load - self._load
        self._load = load

    load = property(attrgetter("_load"), _set_load)  # type: ignore[assignment]

    def elsewhere(self, change: int) -> None:
        """Other processes took, or gave back, so many."""
        self._load += change

    def take(self, news: WorkerNews) -> None:
        """Become what the parent says."""
        for name in WorkerNews.of_worker:
            setattr(self, name, getattr(news, name))
        circuit = self.circuit
        circuit.state, circuit.troubled, circuit.probing = news.circuit, news.troubled, news.probing


class Loads:
    """The other children's columns, added to the workers' loads as they change."""

    def __init__(self, board: Board, child: int):
        self._memory = board.memory
        self._starts = [board.loads_at(other) for other in range(board.count) if other != child]
        self._size = 0
        self._seen = [b""] * len(self._starts)
        self._rows: list[SharedWorker | None] = []

    def add(self, worker: SharedWorker) -> None:
        """Begin to keep a worker's load; its row's former worker has no requests left anywhere."""
        row = worker.row
        if row >= len(self._rows):
            self._rows += [None] * (row + 1 - len(self._rows))
            self._size = 8 * len(self._rows)
            self._seen = [seen.ljust(self._size, b"\0") for seen in self._seen]
        self._rows[row] = worker
        worker.elsewhere(sum(memoryview(seen).cast("q")[row] for seen in self._seen))

    def refresh(self) -> None:
        """Bring all loads to what holds now."""
        memory, size, seen = self._memory, self._size, self._seen
        for index, start in enumerate(self._starts):
            now = memory[start:start + size]
            if now != seen[index]:
                self._apply(seen[index], now)
                seen[index] = now

    def _apply(self, old: bytes, new: bytes) -> None:
        rows = self._rows
        for at in range(0, len(new), 8 * _STEP):
            before, after = old[at:at + 8 * _STEP], new[at:at + 8 * _STEP]
            if before != after:
                pairs = zip(memoryview(before).cast("q"), memoryview(after).cast("q"))
                for row, (was, is_now) in enumerate(pairs, at // 8):
                    if was != is_now:
                        worker = rows[row]
                        if worker is not None:
                            worker.elsewhere(is_now - was)


class SharedRegistry(Registry):
    """A child's registry: it holds what the parent says, and tells it what becomes of requests.

    ``refresh`` is called before each look at the workers.
    """

    def __init__(self, refresh: Callable[[], None], tell: Callable[[Failed | Served | Probed], None],
                 circuit_rules: CircuitRules):
        super().__init__(circuit_rules=circuit_rules)
        self._look = refresh
        self._tell = tell

    def __iter__(self) -> Iterator[Worker]:
        self._look()
        return super().__iter__()

    def available(self, role: Role) -> tuple[Worker, ...]:
        self._look()
        return self._available[role]

    def changed(self) -> None:
        """Workers are no longer what they were."""
        self._refresh()

    # ------------------------------------------------------------------ circuits are the parent's

    def request_failed(self, worker: Worker, now: float) -> bool:
        if self._circuit_rules.enabled:
            worker.circuit.troubled = True  # From now on successes matter.
            self._tell(Failed(worker.id))
        return False

    def request_served(self, worker: Worker) -> bool:
        self._tell(Served(worker.id))
        return False

    def probe(self, reservation: Reservation) -> None:
        super().probe(reservation)
        self._tell(Probed(reservation.worker.id, True))

    def _released(self, reservation: Reservation) -> None:
        if reservation in self._probes:
            self._tell(Probed(reservation.worker.id, False))
        super()._released(reservation)
