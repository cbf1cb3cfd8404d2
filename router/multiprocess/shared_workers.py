"""The workers as a child sees them: what the parent told of each, and loads over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..config.endpoint import Endpoint
from ..workers.circuit import CircuitRules
from ..workers.compatibility import Pairs
from ..workers.models import Group, Models
from ..workers.registry import Registry, Reservation, Role, Worker
from .messages import Failed, Probed, Served, WorkerUpdate
from .ring import RingReader, words
from .shared_stats import MOST_WORKERS, RING_HEAD, SharedStats

_STEP = 512
"""Bytes of a column that are compared at once: of a thousand workers at most 64 are walked for one change."""


class SharedWorker(Worker):
    """A worker whose ``load`` is over all processes: as of the last look at the others, and this process's own since.

    What is added to it, or taken away, goes to this process's column of the board; what others added or took away, to
    ``known_load``.
    """

    __slots__ = ("row", "_column")

    def __init__(self, endpoint: Endpoint, role: Role, *, api_key: str | None, rank: int | None, root: Worker | None,
                 row: int, column: memoryview):
        self.row = row
        self._column = column
        super().__init__(endpoint, role, api_key=api_key, rank=rank, root=root)

    def change_load(self, change: int) -> None:
        self._column[self.row] += change
        self.shift_load(change)

    def take(self, news: WorkerUpdate) -> None:
        """Become what the parent says."""
        for name in WorkerUpdate.of_worker:
            setattr(self, name, getattr(news, name))
        circuit = self.circuit
        circuit.state, circuit.troubled, circuit.probing = news.circuit, news.troubled, news.probing


class SharedSlots:
    """Quarantine over all processes: a worker has one suspect of any of them."""

    def __init__(self, board: SharedStats, child: int):
        self._lock = board.lock
        self._columns = [board.suspects(other) for other in range(board.count)]
        self._own = self._columns[child]

    def free(self, worker: Worker) -> bool:
        row = worker.row  # type: ignore[attr-defined]  # a SharedWorker, as all are here
        return not any(column[row] for column in self._columns)

    def take(self, worker: Worker) -> bool:
        with self._lock:
            if not self.free(worker):
                return False
            self._own[worker.row] = 1  # type: ignore[attr-defined]
            return True

    def give(self, worker: Worker) -> None:
        self._own[worker.row] = 0  # type: ignore[attr-defined]


class Neighbour:
    """Another child, as far as decisions depend on it: its column of loads, and its ring."""

    def __init__(self, board: SharedStats, child: int, rows: list[SharedWorker | None]):
        self._memory = board.memory
        self._start = self._end = board.loads_at(child)
        self._seen = b""
        self._few: tuple[int, ...] | None = ()
        """What was seen, as numbers, while it is not much."""
        self._rows = rows
        self._cells = board.cells(child)
        self._ring = RingReader(board, child)
        self.apply = self._ring.apply

    def cover(self, rows: int) -> None:
        """Look at so many rows."""
        self._end = self._start + 8 * rows
        self._seen = self._seen.ljust(8 * rows, b"\0")
        self._unpack = words(rows).unpack
        self._few = self._unpack(self._seen) if len(self._seen) <= _STEP else None

    def load(self, row: int) -> int:
        """A row's load as of the last ``look``."""
        return int(memoryview(self._seen).cast("q")[row])

    def look(self) -> None:
        """Take in what is new: before each decision, so in few words."""
        now = self._memory[self._start:self._end]
        if now != self._seen:
            if self._few is not None:
                few, self._few = self._few, self._unpack(now)
                for worker, before, after in zip(self._rows, few, self._few):
                    if before != after and worker is not None:
                        worker.shift_load(after - before)
            else:
                self._note_many(self._seen, now)
            self._seen = now
        head = self._cells[RING_HEAD]
        if head != self._ring.at:
            self._ring.read(head)

    def _note_many(self, seen: bytes, now: bytes) -> None:
        for at in range(0, len(now), _STEP):
            before, after = seen[at:at + _STEP], now[at:at + _STEP]
            if before != after:
                unpack = words(len(after) // 8).unpack
                for row, was, is_now in zip(range(at // 8, MOST_WORKERS), unpack(before), unpack(after)):
                    worker = self._rows[row]
                    if was != is_now and worker is not None:
                        worker.shift_load(is_now - was)


class SharedRegistry(Registry):
    """A child's registry: it holds what the parent says, and tells it what becomes of requests."""

    def __init__(self, board: SharedStats, child: int, tell: Callable[[Failed | Served | Probed], None],
                 circuit_rules: CircuitRules, models: Models | None = None):
        super().__init__(circuit_rules=circuit_rules, models=models)
        self._rows: list[SharedWorker | None] = []
        self.neighbours = [Neighbour(board, other, self._rows) for other in range(board.count) if other != child]
        self._tell = tell

    def __iter__(self) -> Iterator[Worker]:
        self.look()
        return super().__iter__()

    def available(self, role: Role, group: Group = None) -> tuple[Worker, ...]:
        for neighbour in self.neighbours:
            neighbour.look()
        return super().available(role, group)

    def pairs(self, group: Group = None) -> Pairs:
        for neighbour in self.neighbours:
            neighbour.look()
        return super().pairs(group)

    def look(self) -> None:
        """See what the other processes did."""
        for neighbour in self.neighbours:
            neighbour.look()

    def add(self, worker: Worker) -> None:
        """The former worker of the row, if there was one, has no requests left in any process."""
        assert isinstance(worker, SharedWorker)
        self.look()  # A row's former worker must not keep what was given back since.
        missing = worker.row + 1 - len(self._rows)
        if missing > 0:
            self._rows += [None] * missing
            for neighbour in self.neighbours:
                neighbour.cover(len(self._rows))
        self._rows[worker.row] = worker
        worker.shift_load(sum(neighbour.load(worker.row) for neighbour in self.neighbours))
        super().add(worker)

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
