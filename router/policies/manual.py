"""sglang-router's ``manual``: a routing key stays with the worker that it was assigned to, whichever joins later.

Unlike a hash, the table knows which worker each key has: a new worker takes no key from another, and only keys of an
unavailable worker move. A key whose worker comes back returns to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import Literal

import msgspec

from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..net.body import RoutingFields
from ..net.request import Request
from ..workers.registry import Worker
from .base import ROUTING_KEY, Decision, Policy, Publish, Replication
from .load_view import LoadView

AssignmentMode = Literal["random", "min_load", "min_group"]
MAX_KEYS = 2**20
"""About 200 MB; beyond it the key that was unused for longest is forgotten."""
_MAX_WORKERS_PER_KEY = 2


class _Entry(msgspec.Struct, gc=False):
    """The ids of the last workers that a key was assigned to, the first of which is preferred, and its last use."""

    workers: tuple[int, ...]
    used: float


class KeyTable:
    """Routing key, as a number -> the workers it was assigned to; the one used last is at the end."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self.groups: Counter[int] = Counter()
        """Keys of each worker."""
        self.now = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: int) -> tuple[int, ...]:
        """Returns the workers of a key, which is used now; none where it is new."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return ()
        entry.used = self.now
        self._entries[key] = entry
        return entry.workers

    def assign(self, key: int, worker_id: int, *, new: bool = True) -> None:
        """Assigns a key to a further worker. ``new``: it had none; where two processes assign it at once, both
        prefer the same worker from then on."""
        before = self._entries.pop(key, None)
        known = before.workers if before is not None else ()
        if worker_id not in known:
            known = (*known[1 - _MAX_WORKERS_PER_KEY:], worker_id)
            if new:
                known = tuple(sorted(known))
            self.groups[worker_id] += 1
        if before is not None:
            self._leave(set(before.workers) - set(known))
        elif len(self._entries) >= MAX_KEYS:
            self._forget(next(iter(self._entries)))
        self._entries[key] = _Entry(known, self.now)

    def evict(self, before: float) -> None:
        """Forgets keys that were not used since a time."""
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest].used >= before:
                return
            self._forget(oldest)

    def _forget(self, key: int) -> None:
        self._leave(self._entries.pop(key).workers)

    def _leave(self, workers: Sequence[int] | set[int]) -> None:
        for worker_id in workers:
            self.groups[worker_id] -= 1
            if not self.groups[worker_id]:
                del self.groups[worker_id]


class Manual:
    """By ``X-SMG-Routing-Key``; a request without it gets any worker.

    A new key goes to any worker (``random``; over time to each as often), the one with the fewest requests
    (``min_load``) or with the fewest keys (``min_group``). Keys that were not used for ``max_idle`` seconds are
    forgotten every ``eviction_interval`` seconds.
    """

    def __init__(self, rng: Random, *, mode: AssignmentMode = "random", max_idle: float = 14400.0,
                 eviction_interval: float = 60.0):
        self._rng = rng
        self._loads = LoadView()
        self._mode = mode
        self._max_idle = max_idle
        self._interval = eviction_interval
        self._next_eviction = 0.0
        self._workers: Sequence[Worker] = ()
        self._by_id: dict[int, Worker] = {}
        self._deck: list[int] = []
        self.table = KeyTable()
        self._publish: Publish | None = None

    def replicate(self, replication: Replication) -> None:
        self._publish = replication.channel(self._assign_record)

    def _assign_record(self, words: list[int], worker_id: int, new: int) -> None:
        """Takes in that another process assigned a key to a worker."""
        for key in words[:1]:
            self.table.assign(key, worker_id, new=bool(new))

    def read(self, request: Request, fields: RoutingFields | None) -> bytes:
        return request.header(ROUTING_KEY)

    def choose(self, workers: Sequence[Worker], subject: bytes) -> Decision:
        if not subject:
            return Decision(self._rng.choice(workers), "no_session")
        if workers is not self._workers:
            self._workers, self._by_id = workers, {worker.id: worker for worker in workers}
        key = int.from_bytes(blake2b(subject, digest_size=8).digest(), "little", signed=True)
        known = self.table.find(key)
        for worker_id in known:
            if worker_id in self._by_id:
                return Decision(self._by_id[worker_id], "session")
        worker = self._assign(workers)
        self.table.assign(key, worker.id, new=not known)
        if self._publish is not None:
            self._publish(worker.id, int(not known), (key,))
        return Decision(worker, "moved_session" if known else "new_session")

    def sweep(self, now: float) -> None:
        """Called every second or so; ``now`` in seconds."""
        self.table.now = now
        if self._max_idle and now >= self._next_eviction:
            self.table.evict(now - self._max_idle)
            self._next_eviction = now + self._interval

    def _assign(self, workers: Sequence[Worker]) -> Worker:
        if self._mode == "min_load":
            return self._loads.next_least_loaded(workers, self._rng.randrange(len(workers)))
        if self._mode == "min_group":
            groups = [self.table.groups[worker.id] for worker in workers]
            least = min(groups)
            return self._rng.choice([worker for worker, keys in zip(workers, groups) if keys == least])
        return self._from_deck(workers)

    def _from_deck(self, workers: Sequence[Worker]) -> Worker:
        """Returns a random worker, each once before one comes again: five keys never all go to one of two workers."""
        while self._deck:
            worker = self._by_id.get(self._deck.pop())
            if worker is not None:
                return worker
        self._deck = [worker.id for worker in workers]
        self._rng.shuffle(self._deck)
        return self._by_id[self._deck.pop()]


@ROUTING_POLICIES.register("manual")
def make(args: PolicyArgs, rng: Random) -> Policy:
    return Manual(rng, mode=args.assignment_mode, max_idle=args.max_idle_secs, eviction_interval=args.eviction_interval)
