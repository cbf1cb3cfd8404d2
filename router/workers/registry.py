"""The workers with their health, circuits and loads: plain state, no I/O."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from ...common.api.errors import Conflict, NotFound
from ...common.config.roles import Role as RoleFacts
from ..config.circuit import CircuitRules
from ..config.endpoint import Endpoint
from ..net.request import Group
from .circuit import Circuit
from .compatibility import Misfit, Pairs
from .models import Models
from .roles import PAIR, REGULAR, WORKER_ROLES

Role = str
"""A name of WORKER_ROLES."""
State = Literal["starting", "healthy", "unhealthy"]
DEFAULT_BOOTSTRAP_PORT = 8998

_ids = itertools.count()


class WorkerMetadata(msgspec.Struct, frozen=True):
    """An administrator's notes on a worker, in sglang-router's fields: shown, and nothing else."""

    priority: int = 50
    cost: float = 1.0
    labels: dict[str, str] = {}


class LoadOrder(Protocol):
    """Keeps workers in order of their loads."""

    def load_changed(self, worker: Worker, before: int) -> None:
        """Moves a worker whose ``known_load`` was ``before``."""
        ...


class Worker:
    """One instance that requests may be sent to.

    - Identity: ``id`` is never reused, so a worker that left and came back is another worker.
    - Health (changed by the registry only): ``state``; ``failures`` and ``successes`` in a row; ``hung``: it answers
      no checks at all, so requests that it has not begun to answer probably never will be; ``checked``: its first check
      is over; ``always_healthy``: neither checks nor failed requests make it unavailable.
    - Administration: ``named``: the router was started with it; ``metadata``: an administrator's notes.
    - Learnt from the worker before it first takes traffic: ``role`` when ``asks_role``; ``bootstrap_port`` (None: the
      router sends null) when ``asks_port``; ``model_ids`` (none: unknown) and their ``model_cards`` (see
      ``/v1/models``) when ``asks_models``; ``is_baton``: one of our servers, which serves a whole request alone, and
      continues answers of others; ``keeps_files``: it has a folder for them; ``response_tag``: what the ids of the
      answers that it stores begin with.
    - Role of a server that may change its own: ``switches``: requests name the role in which they are sent there;
      ``serves_whole``: in a cluster of pairs it computes whole requests, without a prefill worker.
    - Pairs: ``pair_key`` (equal for workers that fit with the same others; None: unknown), ``model_fingerprint``,
      ``epoch`` (another one when what was learnt may have changed), and as trials showed (see ``compatibility``)
      ``fitting``, the kinds of decode workers that a prefill worker fits with (None: all), and ``misfits``.
    - Data-parallel rank of a server (see ``dp_ranks``): ``rank``, and ``root``, the same object for all ranks (a worker
      without ranks is its own root). ``url`` includes the rank, ``endpoint`` is the server's.
    - Load: ``load`` counts reservations that are not released yet; ``on_release``, where set, is called with each
      release, and each of ``load_orders`` with each change of the load; ``peak_load``: the most since somebody set it.
    - ``cached_tokens``: tokens in its prefix cache, None unless its KV events are followed (see ``kv_event_watch``).
    - ``draining``: it gets no new requests, and is removed once its load is 0.
    - Weights: ``weight_version``, their name as it reports it; ``outdated``, why it gets no requests although it is
      healthy: the cluster serves other weights, "" if it does not (see ``weight_versions``); ``hold``, the mode of the
      update that runs on it, "" without one: requests wait meanwhile (see ``relay.request_hold``).
    - ``circuit``: its circuit breaker, changed by the registry once the worker is in it.
    """

    __slots__ = ("id", "endpoint", "url", "api_key", "role", "bootstrap_port", "asks_role", "asks_port",
                 "asks_models", "model_ids", "model_cards", "state", "failures", "successes", "hung", "known_load",
                 "load_orders", "on_release", "draining", "is_baton", "circuit", "cached_tokens", "rank", "root",
                 "peak_load", "keeps_files", "response_tag", "checked", "always_healthy", "named", "metadata",
                 "pair_key", "model_fingerprint", "epoch", "fitting", "misfits", "stage", "weight_version", "outdated",
                 "hold", "switches", "serves_whole")

    def __init__(self, endpoint: Endpoint, role: Role = REGULAR, *, asks_role: bool = False,
                 bootstrap_port: int | None | Literal["ask"] = "ask", api_key: str | None = None,
                 rank: int | None = None, root: Worker | None = None, model_id: str | None = None,
                 always_healthy: bool = False, named: bool = False, metadata: WorkerMetadata | None = None):
        self.id = next(_ids)
        self.endpoint = endpoint
        self.api_key = api_key
        self.rank = rank
        self.root = root or self
        self.url = endpoint.url if rank is None else f"{endpoint.url}@{rank}"
        self.role: Role = role
        self.asks_role = asks_role
        self.asks_port = bootstrap_port == "ask"
        self.bootstrap_port = DEFAULT_BOOTSTRAP_PORT if bootstrap_port == "ask" else bootstrap_port
        self.asks_models = model_id is None
        self.model_ids: tuple[str, ...] = () if model_id is None else (model_id,)
        self.model_cards: tuple[dict[str, Any], ...] = ()
        self.state: State = "starting"
        self.failures = 0
        self.successes = 0
        self.hung = False
        self.known_load = 0
        self.peak_load = 0
        self.load_orders: tuple[LoadOrder, ...] = ()
        self.on_release: Callable[[Reservation], None] | None = None
        self.draining = False
        self.is_baton = False
        self.keeps_files = False
        self.switches = False
        self.serves_whole = False
        self.response_tag: str | None = None
        self.circuit = Circuit(CircuitRules())
        self.cached_tokens: int | None = None
        self.pair_key: str | None = None
        self.model_fingerprint: str | None = None
        self.stage = ""
        """The progress of a worker that starts, as it reports it: ``downloading, 34 %``."""
        self.epoch: str | None = None
        self.fitting: frozenset[str] | None = None
        self.misfits: tuple[Misfit, ...] = ()
        self.weight_version: str | None = None
        self.outdated = ""
        self.hold = ""
        self.checked = False
        self.always_healthy = always_healthy
        self.named = named
        self.metadata = metadata or WorkerMetadata()

    def __repr__(self) -> str:
        return f"<{self.role} {self.url} {self.state} load={self.load}>"

    @property
    def facts(self) -> RoleFacts:
        """The facts of its role."""
        return WORKER_ROLES[self.role]

    @property
    def load(self) -> int:
        return self.known_load

    @load.setter
    def load(self, load: int) -> None:
        self.change_load(load - self.known_load)

    def change_load(self, change: int) -> None:
        """Counts requests of this process that began (or, negative, ended)."""
        before = self.known_load
        self.known_load = load = before + change
        if load > self.peak_load:
            self.peak_load = load
        if self.load_orders:
            for order in self.load_orders:
                order.load_changed(self, before)

    shift_load = change_load
    """Counts requests of another process."""

    def for_rank(self, rank: int | None) -> Worker:
        """Returns a new worker for one rank of the same server (None: for the server as a whole)."""
        return Worker(self.endpoint, self.role, asks_role=self.asks_role, api_key=self.api_key, rank=rank,
                      bootstrap_port="ask" if self.asks_port else self.bootstrap_port, root=self.root,
                      model_id=None if self.asks_models else self.model_ids[0],
                      always_healthy=self.always_healthy, named=self.named, metadata=self.metadata)

    def renewed(self, role: Role | None = None) -> Worker:
        """Returns a new worker for the same server, of unknown state but for its ``role``, where given."""
        return Worker(self.endpoint, role or self.role, asks_role=self.asks_role, api_key=self.api_key,
                      bootstrap_port="ask" if self.asks_port else self.bootstrap_port,
                      model_id=None if self.asks_models else self.model_ids[0],
                      always_healthy=self.always_healthy, named=self.named, metadata=self.metadata)

    def describe(self) -> dict[str, Any]:
        """Returns the worker as ``/list_workers`` shows it."""
        shown: dict[str, Any] = {"id": str(self.id), "url": self.url, "role": self.role, "state": self.state,
                                 "healthy": self.state == "healthy", "load": self.load, "circuit": self.circuit.state,
                                 "draining": self.draining, "models": list(self.model_ids),
                                 "cached_tokens": self.cached_tokens, "dp_rank": self.rank,
                                 "model_fingerprint": self.model_fingerprint, "weight_version": self.weight_version,
                                 "misfits": [{"worker": other.worker, "why": other.why} for other in self.misfits]}
        if self.outdated:
            shown["outdated"] = self.outdated
        if self.serves_whole:
            shown["serves_whole"] = True
        if self.stage:
            shown["stage"] = self.stage
        if self.facts.sends_kv:
            shown["bootstrap_port"] = self.bootstrap_port
        return shown


class Reservation(msgspec.Struct, eq=False, gc=False):
    """One unit of a worker's load, from the decision to the end of the attempt; released exactly once.

    Its creator adds it to ``worker.load`` (``change_load``).
    """

    worker: Worker
    active: bool = True

    def release(self) -> None:
        assert self.active, "a reservation was released twice"
        self.active = False
        worker = self.worker
        worker.change_load(-1)
        if worker.on_release is not None:
            worker.on_release(self)


class Registry:
    """All workers by URL, and for each role and model those that may take new requests.

    ``available(role, group)`` is one tuple object until its workers change, so that a decision costs no filtering and
    a policy may cache what it derives from the tuple. ``models`` decides which group a request is for.
    """

    def __init__(self, *, failure_threshold: int = 3, success_threshold: int = 2,
                 circuit_rules: CircuitRules | None = None, on_drained: Callable[[Worker], None] | None = None,
                 models: Models | None = None):
        self.models = models or Models()
        self.unchecked: tuple[Worker, ...] = ()
        """The workers whose first check is not over."""
        self.hold = ""
        """The mode of the update of weights for which requests wait; "" if there is none."""
        self.listeners: list[Callable[[], None]] = []
        """Called whenever workers come, go, or become available or not."""
        self.on_probe: Callable[[Worker, bool], None] = lambda worker, runs: None
        """Called when the probe of a worker's half-open circuit begins (True) or ends (False)."""
        self._circuit_rules = circuit_rules or CircuitRules()
        self._probes: set[Reservation] = set()
        self._on_drained = on_drained or (lambda worker: None)
        self._failure_threshold = failure_threshold
        self._success_threshold = success_threshold
        self._workers: dict[str, Worker] = {}
        self._available: dict[tuple[str, Group], tuple[Worker, ...]] = {}
        self._pairs: dict[Group, Pairs] = {}
        self.rebuild()

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(tuple(self._workers.values()))

    def __contains__(self, worker: Worker) -> bool:
        return self._workers.get(worker.url) is worker

    def add(self, worker: Worker) -> None:
        """Registers a worker; raises Conflict when its URL is taken."""
        if worker.url in self._workers or any(
                known.endpoint == worker.endpoint and known.root is not worker.root for known in self):
            raise Conflict(f"Worker {worker.url} is already registered.")
        self._workers[worker.url] = worker
        worker.circuit = Circuit(self._circuit_rules)
        self.rebuild()

    def remove(self, url: str) -> Worker:
        """Removes a worker from all future decisions; running requests keep their reservations. Raises NotFound."""
        worker = self._workers.pop(url, None)
        if worker is None:
            raise NotFound(f"Worker {url} is not registered.")
        self.rebuild()
        return worker

    def get(self, url: str) -> Worker:
        """Returns the worker of a URL; raises NotFound."""
        worker = self._workers.get(url)
        if worker is None:
            raise NotFound(f"Worker {url} is not registered.")
        return worker

    def workers_at(self, url: str) -> list[Worker]:
        """Returns the worker of a URL, or the ranks of the server there; raises NotFound."""
        workers = [worker for worker in self if worker.endpoint.url == url]
        if not workers:
            raise NotFound(f"Worker {url} is not registered.")
        return workers

    def drain(self, url: str) -> Worker:
        """Removes a worker from all future decisions; ``on_drained(worker)`` is called once nothing runs on it, which
        may be now. Raises NotFound."""
        worker = self.get(url)
        worker.draining = True
        worker.on_release = self._released
        self.update_available()
        if not worker.load:
            self._on_drained(worker)
        return worker

    def available(self, role: Role, group: Group = None) -> tuple[Worker, ...]:
        """The workers of a role and group that may take new requests."""
        return self._available.get((role, group), ())

    def pairs(self, group: Group = None) -> Pairs:
        """The available prefill and decode workers that fit together; one object until they change."""
        pairs = self._pairs.get(group)
        if pairs is None:
            prefills, decodes = (self.available(role, group) for role in PAIR)
            pairs = self._pairs[group] = Pairs(prefills, decodes)
        return pairs

    def ready(self, *, pairs: bool) -> bool:
        """Returns True if a request could be served now; with ``pairs`` by workers of both roles that fit together."""
        if not pairs:
            return bool(self.available(REGULAR))
        return any(self.pairs(group).prefills and self.pairs(group).decodes
                   for group in self.models.groups or (None,))

    def learn_models(self, worker: Worker, cards: Sequence[dict[str, Any]]) -> None:
        """Notes the models that a worker serves, where the administrator did not name one."""
        ids = tuple(card["id"] for card in cards)
        if worker.asks_models and (ids != worker.model_ids or tuple(cards) != worker.model_cards):
            worker.model_ids, worker.model_cards = ids, tuple(cards)
            self.rebuild()

    def record_check_passed(self, worker: Worker) -> bool:
        """Notes a passed health check; returns True if it made the worker available.

        A starting worker needs one, a failed one needs the success threshold.
        """
        worker.failures = 0
        worker.successes += 1
        worker.hung = False
        if worker.state == "healthy" or (worker.state == "unhealthy" and worker.successes < self._success_threshold):
            return False
        worker.state = "healthy"
        worker.circuit.reset()  # It was down and is back: the old process's failures say nothing of the new one.
        self.rebuild()  # Its role is known now.
        return True

    def record_check_failed(self, worker: Worker, *, certain: bool, silent: bool = False) -> bool:
        """Notes a failure; returns True if it made the worker unavailable.

        ``certain`` failures (refused connections) count at once, others from the failure threshold on. ``silent``:
        a health check was not answered.
        """
        worker.successes = 0
        worker.failures += 1
        enough = certain or worker.failures >= self._failure_threshold
        hung_before, worker.hung = worker.hung, silent and enough
        out = worker.state == "healthy" and enough and not worker.always_healthy
        if out:
            worker.state = "unhealthy"
        if out or worker.hung is not hung_before:
            self.update_available()
        return out

    def record_first_check(self, worker: Worker) -> None:
        """Notes that a worker's first check is over, however it ended."""
        if not worker.checked:
            worker.checked = True
            self.update_available()

    # ------------------------------------------------------------------ circuits

    def record_failure(self, worker: Worker, now: float) -> bool:
        """Notes a request that failed by the worker's fault; returns True if it opened the circuit."""
        opened = worker.circuit.record_failure(now)
        if opened:
            self.update_available()
        return opened

    def record_success(self, worker: Worker) -> bool:
        """Notes a request that the worker answered; returns True if it closed the circuit.

        Needs to be called only while ``worker.circuit.troubled``.
        """
        closed = worker.circuit.record_success()
        if closed:
            self.update_available()
        return closed

    def try_half_open(self, worker: Worker, now: float) -> bool:
        """Lets probes through to a worker whose circuit has been open for long enough; returns True if it was."""
        changed = worker.circuit.try_half_open(now)
        if changed:
            self.update_available()
        return changed

    def start_probe(self, reservation: Reservation) -> None:
        """Makes a reservation the probe of a half-open circuit: its worker gets no other request until this ends."""
        worker = reservation.worker
        worker.circuit.probing = True
        worker.on_release = self._released
        self._probes.add(reservation)
        self.update_available()
        self.on_probe(worker, True)

    def _released(self, reservation: Reservation) -> None:
        worker = reservation.worker
        if reservation in self._probes:
            self._probes.remove(reservation)
            self.on_probe(worker, False)
            worker.circuit.probing = False
            if not worker.draining:
                worker.on_release = None
            self.update_available()
        if worker.draining and not worker.load and worker in self:
            self._on_drained(worker)

    def rebuild(self) -> None:
        """Derives models and available workers anew: workers came, left, or are not what they were."""
        workers = tuple(self._workers.values())
        self.models.update(workers, pairs=any(worker.facts.transfers_kv for worker in workers))
        self.update_available()

    def update_available(self) -> None:
        """Derives the available workers by role and group; tuples that did not change stay the same objects."""
        ready = [worker for worker in self._workers.values() if worker.state == "healthy"
                 and worker.circuit.admits and not worker.draining and not worker.outdated]
        by_key: dict[tuple[str, Group], list[Worker]] = {(role, None): [] for role in WORKER_ROLES}
        groups = self.models.groups
        for worker in ready:
            by_key[worker.role, None].append(worker)
            for group in groups and (worker.model_ids or groups):
                by_key.setdefault((worker.role, group), []).append(worker)
        self._pairs = {}  # Derived anew on demand.
        before = self._available
        self._available = {}
        for key, workers in by_key.items():
            now = tuple(workers)
            old = before.get(key, now)
            self._available[key] = old if old == now else now
        self.unchecked = tuple(worker for worker in self._workers.values() if not worker.checked)
        self.hold = next((worker.hold for worker in self._workers.values() if worker.hold), "")
        for listener in self.listeners:
            listener()


def without(workers: Sequence[Worker], excluded: set[Worker]) -> Sequence[Worker]:
    """Returns ``workers`` that are not excluded; the very same object when none is."""
    return [worker for worker in workers if worker not in excluded] if excluded else workers
