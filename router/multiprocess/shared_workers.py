"""The workers as a child sees them: their state as the parent sent it, and loads over all processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..config.circuit import CircuitRules
from ..config.endpoint import Endpoint
from ..net.request import Group
from ..workers.compatibility import Pairs
from ..workers.models import Models
from ..workers.registry import Registry, Role, Worker
from .messages import ProbeChanged, RequestFailed, RequestServed, WorkerUpdate
from .ring_buffer import RingReader, words
from .shared_stats import MAX_WORKERS, RING_HEAD, SharedStats

_STEP = 512
"""Bytes of a column that are compared at once: of a thousand workers at most 64 are walked for one change."""


class SharedWorker(Worker):
    """A worker whose ``load`` is over all processes: as of the last ``refresh`` of the others, and this process's own.

    ``change_load`` also writes to this process's column of shared memory, ``shift_load`` does not: it takes in what
    others did.
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

    def update(self, state: WorkerUpdate) -> None:
        """Takes on the state that the parent sent."""
        for name in WorkerUpdate.worker_fields:
            setattr(self, name, getattr(state, name))
        circuit = self.circuit
        circuit.state, circuit.troubled, circuit.probing = state.circuit, state.troubled, state.probing


class SharedSlots:
    """Quarantine over all processes: a worker has one suspect of any of them."""

    def __init__(self, stats: SharedStats, child: int):
        self._lock = stats.lock
        self._columns = [stats.suspects(other) for other in range(stats.count)]
        self._own = self._columns[child]

    def is_free(self, worker: Worker) -> bool:
        row = _row_of(worker)
        return not any(column[row] for column in self._columns)

    def try_acquire(self, worker: Worker) -> bool:
        with self._lock:
            if not self.is_free(worker):
                return False
            self._own[_row_of(worker)] = 1
            return True

    def release(self, worker: Worker) -> None:
        self._own[_row_of(worker)] = 0


def _row_of(worker: Worker) -> int:
    assert isinstance(worker, SharedWorker)
    return worker.row


class PeerProcess:
    """Another child, as far as decisions depend on it: its column of loads, and its ring buffer."""

    def __init__(self, stats: SharedStats, child: int, rows: list[SharedWorker | None]):
        self._memory = stats.memory
        self._start = self._end = stats.loads_at(child)
        self._seen = b""
        self._seen_loads: tuple[int, ...] | None = ()
        """``_seen`` as numbers, where it is at most ``_STEP`` long."""
        self._rows = rows
        self._cells = stats.cells(child)
        self._ring = RingReader(stats, child)
        self.apply = self._ring.apply

    def resize(self, rows: int) -> None:
        """Reads this many rows from now on."""
        self._end = self._start + 8 * rows
        self._seen = self._seen.ljust(8 * rows, b"\0")
        self._unpack = words(rows).unpack
        self._seen_loads = self._unpack(self._seen) if len(self._seen) <= _STEP else None

    def load(self, row: int) -> int:
        """A row's load as of the last ``refresh``."""
        return int(memoryview(self._seen).cast("q")[row])

    def refresh(self) -> None:
        """Takes in what is new. It is called before each decision, so it does little where nothing is."""
        now = self._memory[self._start:self._end]
        if now != self._seen:
            if self._seen_loads is not None:
                seen, self._seen_loads = self._seen_loads, self._unpack(now)
                for worker, before, after in zip(self._rows, seen, self._seen_loads):
                    if before != after and worker is not None:
                        worker.shift_load(after - before)
            else:
                self._shift_changed(self._seen, now)
            self._seen = now
        head = self._cells[RING_HEAD]
        if head != self._ring.position:
            self._ring.read(head)

    def _shift_changed(self, seen: bytes, now: bytes) -> None:
        """Takes in the loads of many rows, of which few differ."""
        for at in range(0, len(now), _STEP):
            before, after = seen[at:at + _STEP], now[at:at + _STEP]
            if before != after:
                unpack = words(len(after) // 8).unpack
                for row, old, new in zip(range(at // 8, MAX_WORKERS), unpack(before), unpack(after)):
                    worker = self._rows[row]
                    if old != new and worker is not None:
                        worker.shift_load(new - old)


class SharedRegistry(Registry):
    """A child's registry: workers and their circuits are as the parent says, which is sent what becomes of requests."""

    def __init__(self, stats: SharedStats, child: int,
                 send: Callable[[RequestFailed | RequestServed | ProbeChanged], None],
                 circuit_rules: CircuitRules, models: Models | None = None):
        super().__init__(circuit_rules=circuit_rules, models=models)
        self._rows: list[SharedWorker | None] = []
        self.peers = [PeerProcess(stats, other, self._rows) for other in range(stats.count) if other != child]
        self._circuits_enabled = circuit_rules.enabled
        self._send = send
        self.on_probe = self._send_probe

    def __iter__(self) -> Iterator[Worker]:
        self.refresh()
        return super().__iter__()

    def available(self, role: Role, group: Group = None) -> tuple[Worker, ...]:
        for peer in self.peers:
            peer.refresh()
        return super().available(role, group)

    def pairs(self, group: Group = None) -> Pairs:
        for peer in self.peers:
            peer.refresh()
        return super().pairs(group)

    def refresh(self) -> None:
        """Takes in what the other processes did."""
        for peer in self.peers:
            peer.refresh()

    def add(self, worker: Worker) -> None:
        """Registers a SharedWorker. The former worker of its row, if any, has no requests left in any process."""
        assert isinstance(worker, SharedWorker)
        self.refresh()  # Releases of requests on the row's former worker must not count for this one.
        missing = worker.row + 1 - len(self._rows)
        if missing > 0:
            self._rows += [None] * missing
            for peer in self.peers:
                peer.resize(len(self._rows))
        self._rows[worker.row] = worker
        worker.shift_load(sum(peer.load(worker.row) for peer in self.peers))
        super().add(worker)

    # ------------------------------------------------------------------ circuits are the parent's

    def record_failure(self, worker: Worker, now: float) -> bool:
        if self._circuits_enabled:
            worker.circuit.troubled = True  # From now on successes matter.
            self._send(RequestFailed(worker.id))
        return False

    def record_success(self, worker: Worker) -> bool:
        self._send(RequestServed(worker.id))
        return False

    def _send_probe(self, worker: Worker, runs: bool) -> None:
        self._send(ProbeChanged(worker.id, runs))
