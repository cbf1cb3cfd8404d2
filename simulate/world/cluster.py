"""A cluster on the virtual clock: clients, a router, and its servers; ``simulate`` replays a workload against it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ...common.api.errors import ConfigError
from ...common.api.messages import Bootstrap
from ...common.config.server import ScheduleArgs
from ...router.config.policy import PolicyArgs
from ...router.workers.registry import Reservation
from ..costs.model import Costs
from ..results.records import Gaps, Outcome, Run, ServerUsage
from ..workload.request import SimRequest
from .engine import Engine
from .events import Events
from .requests import Prompts, req_of, sampling_of
from .router import Placed, VirtualRouter
from .servers import ServerParts, decode_engine, prefill_engine, unified_engine
from .transfer import PORT, Network

SWEEP_SECONDS = 1.0


@dataclass(frozen=True)
class ClusterSpec:
    """A cluster: ``unified`` servers, or ``prefill`` and ``decode`` servers, with the flags that they would get.

    ``prefill_costs``: of prefill servers that differ from the others, as by their tensor parallelism. ``pool_tokens``:
    tokens of KV cache of each server; None: those of its cost table.
    """

    costs: Costs
    unified: int = 0
    prefill: int = 0
    decode: int = 0
    prefill_costs: Costs | None = None
    schedule: ScheduleArgs = field(default_factory=ScheduleArgs)
    policy: PolicyArgs = field(default_factory=PolicyArgs)
    prefix_cache: bool = True
    pool_tokens: int | None = None
    router: bool = True

    def __post_init__(self) -> None:
        if min(self.unified, self.prefill, self.decode) < 0 or bool(self.prefill) != bool(self.decode):
            raise ConfigError("A cluster has --prefill and --decode servers, one or more of each, or --unified ones.")
        if bool(self.unified) == bool(self.prefill):
            raise ConfigError("Give either --unified, or --prefill and --decode, the number of servers.")
        if self.unified > 1 and not self.router:
            raise ConfigError("Several servers need a router.")

    @property
    def costs_of_prefill(self) -> Costs:
        return self.prefill_costs or self.costs

    @property
    def gpus(self) -> int:
        return (self.unified + self.decode) * self.costs.gpus + self.prefill * self.costs_of_prefill.gpus

    @property
    def name(self) -> str:
        """As ``2P1D`` or ``3U``, with the GPUs of a server where they are several."""
        def of(count: int, letter: str, costs: Costs) -> str:
            return f"{count}{letter}" + (f"x{costs.gpus}" if costs.gpus > 1 else "")
        if self.unified:
            return of(self.unified, "U", self.costs)
        return of(self.prefill, "P", self.costs_of_prefill) + of(self.decode, "D", self.costs)


class _Process:
    """A process that works on one item after the other."""

    __slots__ = ("free", "busy")

    def __init__(self) -> None:
        self.free = 0.0
        self.busy = 0.0

    def done(self, now: float, takes: float) -> float:
        self.busy += takes
        self.free = max(now, self.free) + takes
        return self.free


class _Server:
    """An engine with its API server. ``Outputs`` of the engine; a prefill server's tokens go to no client."""

    def __init__(self, cluster: Cluster, costs: Costs, answers: bool):
        self._cluster = cluster
        self._costs = costs.requests
        self._answers = answers
        self._api = _Process()
        self._last_sent = 0.0
        self.engine: Engine

    def accept(self, delay: float, arrive: Callable[[], None]) -> None:
        """A request comes to the API server; ``arrive`` is called when the engine has it."""
        costs, events = self._costs, self._cluster.events
        api = costs.api_request / 1e3
        before = max(0.0, costs.request / 1e3 - api) + delay
        events.at(events.now + before, self._tokenize, api, arrive)

    def _tokenize(self, seconds: float, arrive: Callable[[], None]) -> None:
        now, api = self._cluster.events.now, self._api
        if (sent := self.engine.skipped_output(now)) is not None:
            api.free = max(api.free, sent[0] + sent[1] * self._costs.api_token / 1e3)
        self._cluster.events.at(api.done(now, seconds), arrive)

    def tokens(self, rids: list[str], ended: list[str], time: float) -> None:
        cluster = self._cluster
        if not self._answers:
            for rid in ended:
                cluster.events.at(time, cluster.prefilled, rid)
            return
        before, self._last_sent = self._last_sent, time
        outcomes, gaps = cluster.outcomes, cluster.gaps
        continuing = 0
        begun = []
        for rid in rids:
            outcome = outcomes[int(rid)]
            outcome.num_tokens += 1
            if outcome.num_tokens == 1:
                begun.append(outcome)
            elif outcome.emitted == before:
                continuing += 1
            else:
                gaps.add(time - outcome.emitted)
            outcome.emitted = time
        if continuing:
            gaps.add(time - before, continuing)
        cluster.events.at(time, self._send, len(rids), begun, [outcomes[int(rid)] for rid in ended])

    def _send(self, rows: int, begun: Sequence[Outcome], ended: Sequence[Outcome]) -> None:
        """The API server sends the tokens of a step to their clients, now."""
        costs, now = self._costs, self._cluster.events.now
        read = self._api.done(now, rows * costs.api_token / 1e3) + costs.answer / 1e3
        for outcome in begun:
            outcome.first = read
        for outcome in ended:
            self._cluster.ended(outcome, read)

    def skipped(self, rids: list[str], steps: int, end_of: Callable[[int], float]) -> None:
        first, last = end_of(0), end_of(steps - 1)
        outcomes, gaps, rows = self._cluster.outcomes, self._cluster.gaps, len(rids)
        self._api.busy += (steps - 1) * rows * self._costs.api_token / 1e3
        before = self._last_sent
        continuing = 0
        for rid in rids:
            outcome = outcomes[int(rid)]
            outcome.num_tokens += steps
            if outcome.emitted == before:
                continuing += 1
            else:
                gaps.add(first - outcome.emitted)
            outcome.emitted = last
        if continuing:
            gaps.add(first - before, continuing)
        gaps.add_steps(end_of, steps, rows)
        self._last_sent = last
        self._cluster.events.at(last, self._send, rows, (), ())

    def failed(self, rid: str, message: str, time: float) -> None:
        self._cluster.failed(rid, message, time)


class Cluster:
    """The servers of a specification, and the requests that are open."""

    def __init__(self, spec: ClusterSpec, seed: int = 0, *, skips: bool = True):
        """``skips``: see world/engine.py; without, every step runs."""
        self.spec = spec
        self.events = Events()
        self.outcomes: list[Outcome] = []
        self.gaps = Gaps()
        self.servers: dict[str, _Server] = {}
        self._prompts = Prompts()
        self._placed: dict[int, Placed] = {}
        self._prefills: dict[int, Reservation] = {}
        self._skips = skips
        costs = spec.costs
        self._most_tokens = spec.pool_tokens or costs.kv_tokens
        self.network = Network(self.events, costs.transfer, costs.page_size)
        names = {letter: [f"{letter}{i}" for i in range(count)]
                 for letter, count in (("u", spec.unified), ("p", spec.prefill), ("d", spec.decode))}
        for name in names["u"]:
            self._add(name, costs, partial(unified_engine, name, self.events))
        for name in names["p"]:
            self._add(name, spec.costs_of_prefill, partial(prefill_engine, name, self.events, network=self.network),
                      decodes=False)
        for name in names["d"]:
            self._add(name, costs, partial(decode_engine, name, self.events, network=self.network))
        self.router = VirtualRouter(spec.policy, names["u"], names["p"], names["d"], seed)
        self.network.connect_all()

    def _add(self, name: str, costs: Costs, make: Callable[[ServerParts, _Server], Engine],
             decodes: bool = True) -> None:
        spec, server = self.spec, _Server(self, costs, decodes)
        schedule = spec.schedule if decodes else spec.schedule.without_decoding
        parts = ServerParts(costs, schedule, decodes=decodes, prefix_cache=spec.prefix_cache, outputs=server,
                            pool_tokens=spec.pool_tokens or costs.kv_tokens,
                            layer_groups=costs.transfer.layer_groups, max_requests=1 << 30)
        server.engine = make(parts, server)
        if not self._skips:
            server.engine.may_skip = lambda: None
        self.servers[name] = server

    # -- requests ------------------------------------------------------------------------------------------------------

    def send(self, request: SimRequest, on_end: Callable[[Outcome], None] | None = None) -> None:
        """A client sends a request, now; ``on_end`` is called when the client has its answer."""
        number = len(self.outcomes)
        outcome = Outcome(number, request, self.events.now, on_end=on_end)
        self.outcomes.append(outcome)
        if request.input_len + request.output_len > self._most_tokens:
            outcome.error = f"needs more than the {self._most_tokens} tokens of KV cache that a server has"
            outcome.first = outcome.last = self.events.now
            if on_end is not None:
                self.events.at(self.events.now, on_end, outcome)
            return
        tokens = self._prompts.tokens(request)
        placed = self.router.place(tokens)
        self._placed[number] = placed
        outcome.servers = placed.names
        sampling = sampling_of(request.output_len)
        if pair := len(placed.names) > 1:
            self._prefills[number] = placed.reservations[0]
        bootstrap = Bootstrap(placed.names[0], PORT, number) if pair else None
        delay = self.spec.costs.requests.router / 1e3 if self.spec.router else 0.0
        for name in placed.names:
            server = self.servers[name]

            def arrive(engine: Engine = server.engine) -> None:
                req = req_of(str(number), tokens, sampling, self.events.now, bootstrap)
                outcome.reqs.append(req)
                engine.arrive(req)

            server.accept(delay, arrive)

    def prefilled(self, rid: str) -> None:
        """A prefill server ends its half of a request, now."""
        if (reservation := self._prefills.pop(int(rid), None)) is not None:
            reservation.release()

    def ended(self, outcome: Outcome, read: float) -> None:
        """A request's last token is sent, which its client reads at time ``read``."""
        outcome.last = read
        outcome.cached = max((req.num_cached_tokens for req in outcome.reqs), default=0)
        outcome.retractions = sum(req.num_retractions for req in outcome.reqs)
        self._release(outcome)
        if outcome.on_end is not None:
            self.events.at(read, outcome.on_end, outcome)

    def failed(self, rid: str, message: str, time: float) -> None:
        outcome = self.outcomes[int(rid)]
        if not outcome.error:
            outcome.error = message
            self.events.at(time, self.ended, outcome, time)

    def _release(self, outcome: Outcome) -> None:
        outcome.reqs.clear()
        if outcome.error and outcome.number in self._prefills:
            self._prefills.pop(outcome.number).release()
        for reservation in self._placed.pop(outcome.number).reservations[-1:]:
            reservation.release()

    # -- a run ---------------------------------------------------------------------------------------------------------

    def run(self, seconds: float = 0.0) -> Run:
        """Run until all requests have ended; ``seconds``: CPU time that was taken before."""
        begin = time.process_time()
        self._sweep_policies()
        self.events.run()
        cpu = time.process_time() - begin + seconds
        last = max((outcome.last for outcome in self.outcomes), default=0.0)
        self._check_ended()
        usage = [ServerUsage.of(name, server.engine, server._api.busy) for name, server in self.servers.items()]
        return Run(self.spec.name, self.spec.gpus, self.outcomes, self.gaps, usage, last, cpu, self.events.num_run,
                   dict(self.network.bytes_sent), dict(self.network.busy_seconds))

    def _sweep_policies(self) -> None:
        self.router.sweep(self.events.now)
        if len(self.events):
            self.events.at(self.events.now + SWEEP_SECONDS, self._sweep_policies)

    def _check_ended(self) -> None:
        """Every request has ended once, and every page is free or cached."""
        still = [outcome.number for outcome in self.outcomes if not outcome.error and
                 outcome.num_tokens != outcome.request.output_len]
        assert not still, f"requests {still[:5]} have not ended"
        for name, server in self.servers.items():
            assert server.engine.scheduler.idle, f"{name} is not idle"
            server.engine.batcher.cache.check_integrity()


def simulate(requests: Sequence[SimRequest], spec: ClusterSpec, *, seed: int = 0, skips: bool = True) -> Run:
    """Replay ``requests`` at their times."""
    begin = time.process_time()
    cluster = Cluster(spec, seed, skips=skips)
    for request in requests:
        cluster.events.at(request.at, cluster.send, request)
    return cluster.run(time.process_time() - begin)


def simulate_closed(requests: Sequence[SimRequest], clients: int, spec: ClusterSpec, *, seed: int = 0) -> Run:
    """Send ``requests`` by so many clients, each the next one when its last has ended; their times are ignored."""
    cluster = Cluster(spec, seed)
    waiting = iter(requests)

    def send_next(_: Outcome | None = None) -> None:
        if (request := next(waiting, None)) is not None:
            cluster.send(replace(request, at=cluster.events.now), send_next)

    for _ in range(clients):
        cluster.events.at(0.0, send_next)
    return cluster.run()
