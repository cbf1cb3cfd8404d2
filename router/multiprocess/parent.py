"""The parent process of a router: its workers, their health, its own endpoints, the sums of metrics.

It is a router that accepts no client and sends no request of one. Children report to it what they see, and pass on what
clients ask of the router itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from ...common.api.errors import ServingError
from ..admission.admission import AdmissionControl
from ..app import Router
from ..components import Health, answer_locally
from ..config import RouterConfig
from ..config.admission import AdmissionRules
from ..monitoring.cluster_view import ClusterView
from ..monitoring.health import HealthMonitor
from ..net.request import Request
from ..net.responses import Response
from ..net.upstream_response import Failure
from ..obs.metrics import Metrics
from ..relay.dispatcher import Dispatcher
from ..relay.poison_guard import Deaths
from ..relay.retry import PASSED_ON
from ..workers.models import Models
from ..workers.registry import Registry, Worker
from .child_process import ChildProcess
from .counters import Totals
from .membership import ReplicatedRegistry, Rows, UpdateFeed
from .messages import (
    AdminRequest,
    AdminResponse,
    CollectCounters,
    Counters,
    ProbeChanged,
    RequestFailed,
    RequestServed,
    WorkerSuspected,
    WorkerUpdates,
)
from .shared_stats import SharedStats

logger = logging.getLogger("baton.router")

_APPLY_SECONDS = 2.0
"""Longest wait of an administrator's change for all children to apply it."""
_COUNT_SECONDS = 1.0
"""Longest wait for children's counters; those of a late one count as it last reported them."""
_POLL_SECONDS = 0.002
_DRAIN_SECONDS = 0.02


class AdmissionTotals:
    """Running, queued and refused requests of all children, for ``Metrics``."""

    def __init__(self, stats: SharedStats):
        self._stats = stats
        self.refused: dict[str, int] = {}

    @property
    def running(self) -> int:
        return sum(self._stats.running)

    @property
    def queued(self) -> int:
        return sum(self._stats.queued)


class Parent:
    """The components of the router in the parent; ``children()`` are those that run."""

    accepts_clients = False

    def __init__(self, config: RouterConfig, stats: SharedStats, children: Callable[[], Sequence[ChildProcess]]):
        self._stats = stats
        self._children = children
        self._rows = Rows(stats)
        self._totals = Totals(stats.count)
        self._admission = AdmissionTotals(stats)
        self._probing: dict[int, int] = {}  # worker's id -> child that probes it
        self._count = 0
        self._cached: list[dict[int, int]] = [{} for _ in range(stats.count)]
        self._scheduled: asyncio.Handle | None = None
        self._drains: asyncio.Task[None] | None = None
        self._replies: set[asyncio.Task[None]] = set()
        self.router = Router(_parent_config(config), components=self)
        self._feed = UpdateFeed(self._registry, self._rows)

    async def start(self) -> None:
        """Starts the router and the sums of metrics; raises ConfigError."""
        await self.router.start()
        self.router.metrics.admission = self._admission
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def stop(self) -> None:
        self._ticker.cancel()
        if self._drains is not None:
            self._drains.cancel()
        await self.router.stop()

    # ------------------------------------------------------------------ components

    def registry(self, config: RouterConfig, on_drained: Callable[[Worker], None]) -> Registry:
        self._leave = on_drained
        self._registry = ReplicatedRegistry(
            failure_threshold=config.health.health_failure_threshold,
            success_threshold=config.health.health_success_threshold, circuit_rules=config.circuit.rules,
            on_drain=self._watch_drains, models=Models.from_args(config.workers))
        self._registry.listeners.append(self._schedule_update)
        return self._registry

    def health(self, config: RouterConfig, registry: Registry, on_ranks: Callable[[Worker, int], None] | None,
               on_role: Callable[[Worker, str], object]) -> Health:
        self._health = HealthMonitor(config.health, registry, on_ranks=on_ranks, on_role=on_role)
        return self._health

    def dispatcher(self, config: RouterConfig, registry: Registry, metrics: Metrics, rng: Random,
                   suspect: Callable[[Worker, Failure], None]) -> Dispatcher:
        """A dispatcher that only checks workers: it makes no decisions, so its policies need not know anything."""
        policy = dataclasses.replace(config.policy, policy="random", prefill_policy=None, decode_policy=None)
        return Dispatcher(dataclasses.replace(config, policy=policy), registry, metrics, rng, suspect)

    def admission(self, rules: AdmissionRules, loop: asyncio.AbstractEventLoop) -> AdmissionControl:
        raise AssertionError("the parent accepts no requests")

    def fail_calls(self, dispatcher: Dispatcher, worker: Worker) -> None:
        """The children fail the calls, which are theirs."""
        self._feed.to_cut.add(worker.id)

    async def apply_changes(self) -> None:
        await self._wait_applied()
        self._read_loads()

    def answer(self, router: ClusterView, request: Request) -> Response | Coroutine[Any, Any, Response]:
        return self._answer(request)

    async def _answer(self, request: Request) -> Response:
        """Answers for all processes, once all of them have applied the requested change. Raises ServingError."""
        if request.method in (b"GET", b"HEAD"):
            await self.collect_counters()
        self._read_loads()
        answer = answer_locally(self.router, request)
        response = answer if isinstance(answer, Response) else await answer
        if request.method not in (b"GET", b"HEAD"):
            await self._wait_applied()
        return response

    # ------------------------------------------------------------------ children

    def snapshot(self) -> WorkerUpdates:
        """All workers, for a child that begins."""
        self._send_update()
        return self._feed.snapshot()

    def deaths(self) -> tuple[Deaths, ...]:
        """Deaths of workers by fingerprint of a request, for a child that begins."""
        return self.router.dispatcher.poison.known()

    def on_child_ended(self, child: int) -> None:
        """Clears all counts of a child that has ended."""
        self._stats.clear(child)
        self._totals.ended(child)
        self._cached[child] = {}
        for worker_id in [known for known, prober in self._probing.items() if prober == child]:
            self._set_probing(worker_id, child, False)

    def on_message(self, child: ChildProcess, message: Any) -> None:
        if isinstance(message, Counters):
            self._take_counts(child, message)
        elif isinstance(message, AdminRequest):
            task = asyncio.get_running_loop().create_task(self._reply(child, message))
            self._replies.add(task)
            task.add_done_callback(self._replies.discard)
        elif isinstance(message, ProbeChanged):
            self._set_probing(message.worker, child.index, message.runs)
        elif isinstance(message, Deaths):
            self.router.dispatcher.poison.learn(message)
            for other in self._children():
                if other is not child:
                    other.send(message)
        else:
            worker = self._registry.by_id(message.worker)
            if worker is not None:
                self._take_outcome(worker, message)

    def _take_outcome(self, worker: Worker, message: WorkerSuspected | RequestFailed | RequestServed) -> None:
        if isinstance(message, WorkerSuspected):
            self._health.suspect(worker, Failure(message.reason, message.detail, message.refused))
            return
        if isinstance(message, RequestFailed):
            self.router.dispatcher.on_server_error(worker)
        else:
            self.router.dispatcher.on_status(worker, 200, PASSED_ON, None)
        self._feed.repeat(worker.id)  # The child may have changed its circuit meanwhile.
        self._registry.rebuild()

    def _set_probing(self, worker_id: int, child: int, runs: bool) -> None:
        worker = self._registry.by_id(worker_id)
        if runs:
            self._probing[worker_id] = child
        elif self._probing.get(worker_id) == child:
            del self._probing[worker_id]
        if worker is not None:
            worker.circuit.probing = worker_id in self._probing
            self._registry.rebuild()

    async def _reply(self, child: ChildProcess, message: AdminRequest) -> None:
        request = Request()
        request.method, request.path = message.method, message.path
        request.query, request.body = message.query, message.body
        try:
            response = await self._answer(request)
        except ServingError as error:
            response = Response.error(error)
        child.send(AdminResponse(message.number, response.status, response.body, response.content_type,
                                 response.headers))

    # ------------------------------------------------------------------ updates

    def _schedule_update(self) -> None:
        if self._scheduled is None:
            self._scheduled = asyncio.get_running_loop().call_soon(self._send_update)

    def _send_update(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        update = self._feed.next_update()
        if update is not None:
            for child in self._children():
                child.send(update)

    async def _wait_applied(self) -> None:
        """Waits, for a while, until all children have applied all updates, and idle workers that drain have left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _APPLY_SECONDS
        self._send_update()
        while self._applied_version() < self._feed.version or self._end_drains():
            if loop.time() > deadline:
                logger.warning("Not all processes of the router applied a change within %g s.", _APPLY_SECONDS)
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _applied_version(self) -> int:
        versions = (child.applied_version for child in self._children() if child.listening)
        return min(versions, default=self._feed.version)

    # ------------------------------------------------------------------ drains

    def _watch_drains(self) -> None:
        if self._drains is None or self._drains.done():
            self._drains = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        while any(worker.draining for worker in self._registry):
            self._end_drains()
            await asyncio.sleep(_DRAIN_SECONDS)

    def _end_drains(self) -> bool:
        """Removes draining workers that have no request in any process; returns whether there were any.

        Only once all children have applied the drain: until then one might still send a request there.
        """
        self._send_update()
        if self._applied_version() < self._feed.version:
            return False
        done = [worker for worker in self._registry if worker.draining and not self._rows.load(worker.id)]
        for worker in done:
            worker.load = 0
            self._leave(worker)
        self._send_update()
        return bool(done)

    # ------------------------------------------------------------------ sums

    async def collect_counters(self) -> None:
        """Sums up the counters of all children as of now."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _COUNT_SECONDS
        self._count += 1
        number = self._count
        asked = [child for child in self._children() if child.listening]
        for child in asked:
            child.send(CollectCounters(number))
        while any(child.listening and child.counted < number for child in asked) and loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        self._totals.fill(self.router.metrics, self._admission.refused)
        self._read_loads()

    def _take_counts(self, child: ChildProcess, message: Counters) -> None:
        child.counted = message.number
        self._totals.update(child.index, message.counts)
        self._cached[child.index] = message.cached_tokens

    def _read_loads(self) -> None:
        for worker in self._registry:
            worker.load = self._rows.load(worker.id)
            worker.cached_tokens = max((cached[worker.id] for cached in self._cached if worker.id in cached),
                                       default=None)

    async def _tick(self) -> None:
        while True:
            await self.collect_counters()
            self._rows.reclaim(self._applied_version())
            await asyncio.sleep(1.0)


def _parent_config(config: RouterConfig) -> RouterConfig:
    """The configuration of the parent, which traces no requests and shares no port."""
    return dataclasses.replace(
        config, http=dataclasses.replace(config.http, router_workers=1),
        observe=dataclasses.replace(config.observe, enable_trace=False, otlp_traces_endpoint=None))

