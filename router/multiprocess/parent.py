"""What a router of several processes does once: its workers, their health, its own endpoints, the sums of metrics.

It is a router that accepts nobody and places nothing. Children tell it what they see and ask it what clients ask of
the router itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

from ...common.api.errors import ServingError
from ..app import Router
from ..components import Components, Health
from ..config import RouterConfig
from ..monitoring.cluster_view import ClusterView
from ..net.http_server import Request
from ..net.responses import Response
from ..net.upstream_answer import Failure
from ..obs.metrics import Metrics
from ..relay.dispatcher import Dispatcher
from ..relay.poison_guard import Deaths
from ..relay.retry import PASSED_ON
from ..workers.registry import Registry, Worker
from .child_process import ChildProcess
from .counters import Totals
from .membership import ReplicatedRegistry, Rows, UpdateFeed
from .messages import Answered, Asks, Count, Counted, Failed, Probed, Served, Suspects, Updates
from .shared_stats import SharedStats

logger = logging.getLogger("baton.router")

_KNOW_SECONDS = 2.0
"""How long an administrator's change waits until all children know it."""
_COUNT_SECONDS = 1.0
"""How long a question for the metrics waits for children; of one that is late, the last answer counts."""
_POLL_SECONDS = 0.002
_DRAIN_SECONDS = 0.02


class Places:
    """What ``Metrics`` shows of admission, over all children."""

    def __init__(self, board: SharedStats):
        self._board = board
        self.refused: dict[str, int] = {}

    @property
    def running(self) -> int:
        return sum(self._board.running)

    @property
    def queued(self) -> int:
        return sum(self._board.queued)


class _Asking(Dispatcher):
    """Asks workers, and relays nothing; what is to be cut, the children cut."""

    to_cut: set[int]

    def cut(self, worker: Worker) -> None:
        self.to_cut.add(worker.id)


class Parent(Components):
    """The parts of the router that the parent is; ``children()`` are those that run."""

    accepts = False

    def __init__(self, config: RouterConfig, board: SharedStats, children: Callable[[], Sequence[ChildProcess]]):
        self._board = board
        self._children = children
        self._rows = Rows(board)
        self._totals = Totals(board.count)
        self._places = Places(board)
        self._probing: dict[int, int] = {}  # worker's id -> child that probes it
        self._count = 0
        self._cached: list[dict[int, int]] = [{} for _ in range(board.count)]
        self._telling: asyncio.Handle | None = None
        self._drains: asyncio.Task[None] | None = None
        self._questions: set[asyncio.Task[None]] = set()
        self.router = Router(_of_parent(config), parts=self)
        self._bulletin = UpdateFeed(self._registry, self._rows)

    async def start(self) -> None:
        """Raises ConfigError."""
        await self.router.start()
        self.router.metrics.admission = self._places  # type: ignore[assignment]
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def stop(self) -> None:
        self._ticker.cancel()
        if self._drains is not None:
            self._drains.cancel()
        await self.router.stop()

    # ------------------------------------------------------------------ the parts

    def registry(self, config: RouterConfig, on_drained: Callable[[Worker], None]) -> Registry:
        self._leave = on_drained
        self._registry = ReplicatedRegistry(
            failure_threshold=config.health.health_failure_threshold,
            success_threshold=config.health.health_success_threshold, circuit_rules=config.circuit.rules,
            changed=self._changed, draining=self._watch_drains, models=config.workers.models)
        return self._registry

    def health(self, config: RouterConfig, registry: Registry,
               on_ranks: Callable[[Worker, int], None] | None) -> Health:
        self._health = super().health(config, registry, on_ranks)
        return self._health

    def dispatcher(self, config: RouterConfig, registry: Registry, metrics: Metrics, rng: Random,
                   suspect: Callable[[Worker, Failure], None]) -> Dispatcher:
        places_nothing = dataclasses.replace(config.policy, policy="random", prefill_policy=None, decode_policy=None)
        dispatcher = _Asking(dataclasses.replace(config, policy=places_nothing), registry, metrics, rng, suspect)
        dispatcher.to_cut = self._bulletin.to_cut
        return dispatcher

    def answer(self, router: ClusterView, request: Request) -> Response | Coroutine[Any, Any, Response]:
        return self._answer(request)

    async def _answer(self, request: Request) -> Response:
        """Answer for all processes; changes are known to all of them by then. Raises ServingError."""
        if request.method in (b"GET", b"HEAD"):
            await self.count()
        self._see_loads()
        answer = super().answer(self.router, request)
        response = answer if isinstance(answer, Response) else await answer
        if request.method not in (b"GET", b"HEAD"):
            await self._all_know()
        return response

    # ------------------------------------------------------------------ children

    def everything(self) -> Updates:
        """For a child that begins."""
        self._tell()
        return self._bulletin.all()

    def deaths(self) -> tuple[Deaths, ...]:
        """For a child that begins."""
        return self.router.dispatcher.poison.known()

    def ended(self, child: int) -> None:
        """A child is gone: nothing is held by it any more."""
        self._board.clear(child)
        self._totals.ended(child)
        self._cached[child] = {}
        for worker_id in [known for known, prober in self._probing.items() if prober == child]:
            self._probe(worker_id, child, False)

    def received(self, child: ChildProcess, message: Any) -> None:
        """Take in what a child says."""
        if isinstance(message, Counted):
            self._take_counts(child, message)
        elif isinstance(message, Asks):
            task = asyncio.get_running_loop().create_task(self._reply(child, message))
            self._questions.add(task)
            task.add_done_callback(self._questions.discard)
        elif isinstance(message, Probed):
            self._probe(message.worker, child.index, message.runs)
        elif isinstance(message, Deaths):
            self.router.dispatcher.poison.learn(message)
            for other in self._children():
                if other is not child:
                    other.tell(message)
        else:
            worker = self._registry.by_id(message.worker)
            if worker is not None:
                self._take_outcome(worker, message)

    def _take_outcome(self, worker: Worker, message: Suspects | Failed | Served) -> None:
        if isinstance(message, Suspects):
            self._health.suspect(worker, Failure(message.reason, message.detail, message.refused))
            return
        if isinstance(message, Failed):
            self.router.dispatcher.on_server_error(worker)
        else:
            self.router.dispatcher.on_status(worker, 200, PASSED_ON, None)
        self._bulletin.repeat(worker.id)  # The child may have thought otherwise of its circuit meanwhile.
        self._registry.changed()

    def _probe(self, worker_id: int, child: int, runs: bool) -> None:
        worker = self._registry.by_id(worker_id)
        if runs:
            self._probing[worker_id] = child
        elif self._probing.get(worker_id) == child:
            del self._probing[worker_id]
        if worker is not None:
            worker.circuit.probing = worker_id in self._probing
            self._registry.changed()

    async def _reply(self, child: ChildProcess, asks: Asks) -> None:
        request = Request()
        request.method, request.path, request.query, request.body = asks.method, asks.path, asks.query, asks.body
        try:
            response = await self._answer(request)
        except ServingError as error:
            response = Response.error(error)
        child.tell(Answered(asks.number, response.status, response.body, response.content_type, response.headers))

    # ------------------------------------------------------------------ news

    def _changed(self) -> None:
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        news = self._bulletin.news()
        if news is not None:
            for child in self._children():
                child.tell(news)

    async def _all_know(self) -> None:
        """Wait, for a while, until all children know what holds, and idle workers that drain have left."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _KNOW_SECONDS
        self._tell()
        while self._known() < self._bulletin.version or self._end_drains():
            if loop.time() > deadline:
                logger.warning("Not all processes of the router took in a change within %g s.", _KNOW_SECONDS)
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _known(self) -> int:
        return min((child.knows for child in self._children() if child.listens), default=self._bulletin.version)

    # ------------------------------------------------------------------ drains

    def _watch_drains(self) -> None:
        if self._drains is None or self._drains.done():
            self._drains = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        while any(worker.draining for worker in self._registry):
            self._end_drains()
            await asyncio.sleep(_DRAIN_SECONDS)

    def _end_drains(self) -> bool:
        """Let draining workers leave that have no request in any process; returns whether there were any.

        Only once all children know: until then one might still place a request there.
        """
        self._tell()
        if self._known() < self._bulletin.version:
            return False
        done = [worker for worker in self._registry if worker.draining and not self._rows.load(worker.id)]
        for worker in done:
            worker.load = 0
            self._leave(worker)
        self._tell()
        return bool(done)

    # ------------------------------------------------------------------ sums

    async def count(self) -> None:
        """Sum up what all children counted until now."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _COUNT_SECONDS
        self._count += 1
        number = self._count
        asked = [child for child in self._children() if child.listens]
        for child in asked:
            child.tell(Count(number))
        while any(child.listens and child.counted < number for child in asked) and loop.time() < deadline:
            await asyncio.sleep(_POLL_SECONDS)
        self._totals.fill(self.router.metrics, self._places.refused)
        self._see_loads()

    def _take_counts(self, child: ChildProcess, counted: Counted) -> None:
        child.counted = counted.number
        self._totals.take(child.index, counted.counts)
        self._cached[child.index] = counted.cached_tokens

    def _see_loads(self) -> None:
        for worker in self._registry:
            worker.load = self._rows.load(worker.id)
            worker.cached_tokens = max((cached[worker.id] for cached in self._cached if worker.id in cached),
                                       default=None)

    async def _tick(self) -> None:
        while True:
            await self.count()
            self._rows.reclaim(self._known())
            await asyncio.sleep(1.0)


def _of_parent(config: RouterConfig) -> RouterConfig:
    """The parent traces no requests, and shares no port."""
    return dataclasses.replace(
        config, http=dataclasses.replace(config.http, router_workers=1),
        observe=dataclasses.replace(config.observe, enable_trace=False, otlp_traces_endpoint=None))

