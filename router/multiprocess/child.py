"""One of a router's serving processes: a whole router, but for what the parent and shared memory do for it."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import uvloop

from ...common.api.errors import ConfigError, WorkerUnavailable
from ...common.api.link import Link
from ...common.obs.logging import setup_logging
from ..admin.weight_updates import HANDLERS
from ..admin.worker_routes import changes_workers
from ..admission.admission import AdmissionControl
from ..app import Router
from ..components import Health, answer_locally
from ..config import RouterConfig
from ..config.admission import AdmissionRules
from ..config.endpoint import Endpoint
from ..monitoring.cluster_view import ClusterView
from ..net.request import Group, Request
from ..net.responses import Response
from ..net.upstream_response import Failure
from ..process_setup import prepare
from ..relay.dispatcher import Dispatcher
from ..relay.poison_guard import Deaths
from ..workers.ask import WorkerClient
from ..workers.models import Models
from ..workers.registry import Registry, Worker
from .counters import dump
from .messages import (
    AdminRequest,
    AdminResponse,
    CollectCounters,
    Counters,
    Listening,
    Shutdown,
    Start,
    StartupFailed,
    ToChild,
    UpdatesApplied,
    WorkerSuspected,
    WorkerUpdate,
    WorkerUpdates,
)
from .shared_admission import SharedAdmission
from .shared_policies import PolicyReplicator
from .shared_stats import SharedStats
from .shared_workers import SharedRegistry, SharedSlots, SharedWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from random import Random

    from ..obs.metrics import Metrics
    from ..policies import Policy
    from ..workers.registry import Role

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PARENT_TIMEOUT_SECONDS = 20.0
"""Longest wait for the parent, which itself waits at most a few seconds for the other children."""
_UPDATE_TIMEOUT_SECONDS = 24 * 3600.0
"""Longest wait for an update of weights, whose end the parent decides."""
_REFRESH_SECONDS = 0.25
"""Between two times that a process without requests takes in what the others published."""
_PARENT_ANSWERS = frozenset((b"/metrics", b"/dashboard/data", b"/add_worker", b"/remove_worker", b"/drain_worker"))


def main() -> None:
    """The child's command line: the descriptor of its end of the link."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends us in order.
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    prepare()
    link = socket.socket(fileno=int(sys.argv[1]))
    if os.getppid() != int(sys.argv[2]):  # The parent died before prctl took effect.
        return
    uvloop.run(_run(link))


async def _run(sock: socket.socket) -> None:
    child: Child | None = None
    begun = asyncio.get_running_loop().create_future()
    ended = asyncio.Event()

    def on_message(message: Any) -> None:
        if isinstance(message, Start):
            begun.set_result(message)
        else:
            early.append(message) if child is None else child.on_message(message)

    early: list[Any] = []
    link = await Link.over(sock, ToChild, on_message, ended.set)
    begin: Start = await begun
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    setup_logging(begin.config.logs, f"router.{begin.child}")
    child = Child(begin, link, ended)
    try:
        await child.start(early)
    except ConfigError as error:
        link.send(StartupFailed(str(error)))
        await link.close()
        return
    link.send(Listening())
    await ended.wait()
    await child.stop()
    link.send(Counters(0, dump(child.router.metrics), {}))
    await link.close()


class Child:
    """The components of a router in a child; the parent does the rest."""

    accepts_clients = True

    def __init__(self, begin: Start, link: Link, ended: asyncio.Event):
        self._begin = begin
        self._link = link
        self._ended = ended
        self._stats = SharedStats(begin.stats_file, begin.count)
        self._column = self._stats.loads(begin.child)
        self._workers: dict[int, SharedWorker] = {}
        self._roots: dict[int, Worker] = {}
        self._pending: dict[int, asyncio.Future[AdminResponse]] = {}
        self._num_asked = 0
        self._ticker: asyncio.Task[None] | None = None
        self.router = Router(begin.config, components=self)

    async def start(self, early: list[Any]) -> None:
        """Applies the updates that came so far, and accepts connections; raises ConfigError."""
        self._early = early
        await self.router.start()
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    async def stop(self) -> None:
        assert self._ticker is not None
        self._ticker.cancel()
        await self.router.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_REFRESH_SECONDS)
            self._registry.refresh()

    # ------------------------------------------------------------------ components

    def registry(self, config: RouterConfig, on_drained: Callable[[Worker], None]) -> Registry:
        self._registry = SharedRegistry(self._stats, self._begin.child, self._link.send, config.circuit.rules,
                                        Models.from_args(config.workers))
        return self._registry

    def health(self, config: RouterConfig, registry: Registry, on_ranks: Callable[[Worker, int], None] | None,
               on_role: Callable[[Worker, str], object]) -> Health:
        return _FailureReporter(self._link, self._registry)

    def dispatcher(self, config: RouterConfig, registry: Registry, metrics: Metrics, rng: Random,
                   suspect: Callable[[Worker, Failure], None]) -> Dispatcher:
        dispatcher = Dispatcher(config, registry, metrics, rng, suspect)
        self._replicator = PolicyReplicator(self._stats, self._begin.child)
        dispatcher.policies.on_build = self._share
        self._share(None, dispatcher.policies.common)
        self._dispatcher = dispatcher
        dispatcher.poison.slots = SharedSlots(self._stats, self._begin.child)
        dispatcher.poison.publish = self._link.send
        for message in (self._begin.workers, *self._begin.deaths, *self._early):
            self.on_message(message)
        return dispatcher

    def _share(self, group: Group, policies: Mapping[Role, Policy]) -> None:
        apply = self._replicator.join(group, policies.values())
        for peer in self._registry.peers:
            peer.apply.update(apply)

    def admission(self, rules: AdmissionRules, loop: asyncio.AbstractEventLoop) -> AdmissionControl:
        return SharedAdmission(rules, loop, self._stats, self._begin.child, self._begin.signals)

    def fail_calls(self, dispatcher: Dispatcher, worker: Worker) -> None:
        dispatcher.fail_calls(worker)

    async def apply_changes(self) -> None:
        raise AssertionError("the parent updates weights")

    def answer(self, router: ClusterView, request: Request) -> Response | Coroutine[Any, Any, Response]:
        if request.path in HANDLERS:
            return self._ask_parent(request, _UPDATE_TIMEOUT_SECONDS)
        if request.path in _PARENT_ANSWERS or changes_workers(request):
            return self._ask_parent(request, _PARENT_TIMEOUT_SECONDS)
        return answer_locally(router, request)

    async def _ask_parent(self, request: Request, timeout: float) -> Response:
        """Passes a request on to the parent; returns its response."""
        self._num_asked += 1
        number = self._num_asked
        answer: asyncio.Future[AdminResponse] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        self._link.send(AdminRequest(number, request.method, request.path, request.query, request.body))
        try:
            response = await asyncio.wait_for(answer, timeout)
        except asyncio.TimeoutError:
            return Response.error(WorkerUnavailable("The router's parent process does not answer.", retry_after=1.0))
        finally:
            del self._pending[number]
        return Response(response.status, response.body, response.content_type, response.headers)

    # ------------------------------------------------------------------ messages of the parent

    def on_message(self, message: Any) -> None:
        if isinstance(message, WorkerUpdates):
            self._apply(message)
        elif isinstance(message, AdminResponse):
            answer = self._pending.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif isinstance(message, CollectCounters):
            cached = {worker.id: worker.cached_tokens for worker in self._workers.values()
                      if worker.cached_tokens is not None}
            self._link.send(Counters(message.number, dump(self.router.metrics), cached))
        elif isinstance(message, Deaths):
            self._dispatcher.poison.learn(message)
        elif isinstance(message, Shutdown):
            self._ended.set()

    def _apply(self, update: WorkerUpdates) -> None:
        for worker_id in update.removed:
            worker = self._workers.pop(worker_id)
            self._registry.remove(worker.url)
            if worker_id in update.cut:
                self._dispatcher.fail_calls(worker)
            self._dispatcher.close_pool(worker)
        for state in update.changed:
            known = self._workers.get(state.id)
            if known is None:
                self._add(state)
            else:
                known.update(state)
                if known.api_key != state.api_key:
                    known.api_key = state.api_key
                    self._dispatcher.update_key(known)
                if known.hung:
                    self._dispatcher.fail_silent_calls(known)
        self._registry.rebuild()
        for group in self._registry.models.groups:  # Before a request asks for it: others publish already.
            self._dispatcher.policies.of(group)
        self._link.send(UpdatesApplied(update.version))

    def _add(self, state: WorkerUpdate) -> None:
        worker = SharedWorker(Endpoint.parse(state.server), state.role, api_key=state.api_key, rank=state.rank,
                              root=self._roots.get(state.root), row=state.row, column=self._column)
        worker.id = state.id
        if state.root not in self._roots:
            known = {other.root for other in self._workers.values()}
            self._roots = {number: root for number, root in self._roots.items() if root in known}
            self._roots[state.root] = worker
        self._workers[worker.id] = worker
        self._registry.add(worker)
        worker.update(state)
        self._dispatcher.open_pool(worker)


class _FailureReporter:
    """A child's health monitor: it reports failures to the parent, and checks nothing itself."""

    def __init__(self, link: Link, registry: SharedRegistry):
        self._link = link
        self._registry = registry

    def watch(self, worker: Worker, client: WorkerClient) -> None:
        raise AssertionError("the parent watches the workers")

    def unwatch(self, worker: Worker) -> None:
        raise AssertionError("the parent watches the workers")

    def suspect(self, worker: Worker, failure: Failure) -> None:
        if worker in self._registry:
            if failure.refused and self._registry.record_check_failed(worker, certain=True):
                logging.getLogger("baton.router").warning("Worker %s takes no requests: %s.", worker.url,
                                                          failure.detail)
            self._link.send(WorkerSuspected(worker.id, failure.reason, failure.detail, failure.refused))

    async def relearn(self, client: WorkerClient, seconds: float) -> None:
        raise AssertionError("the parent updates weights")

    def settle_weights(self, updated: Sequence[Worker]) -> None:
        raise AssertionError("the parent updates weights")

    def take_out(self, worker: Worker, reason: str, epoch: str | None) -> None:
        raise AssertionError("the parent updates weights")

    async def close(self) -> None:
        pass


if __name__ == "__main__":
    main()
