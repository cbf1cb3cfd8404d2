"""The components of a router, and how they are built. A process of several (see ``multiprocess``) builds its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, Protocol

from .admin.endpoints import admin_routes
from .admin.worker_routes import serve_workers
from .admission.admission import Admission, AdmissionControl
from .config import RouterConfig
from .config.admission import AdmissionRules
from .monitoring.cluster_view import ClusterView
from .monitoring.health import HealthMonitor
from .net.request import Request
from .net.responses import Response, check_method
from .net.upstream_response import Failure
from .obs.metrics import Metrics
from .relay.dispatcher import Dispatcher
from .workers.ask import WorkerClient
from .workers.models import Models
from .workers.registry import Registry, Worker


class Health(Protocol):
    """Decides which workers take traffic."""

    def watch(self, worker: Worker, client: WorkerClient) -> None: ...
    def unwatch(self, worker: Worker) -> None: ...
    def suspect(self, worker: Worker, failure: Failure) -> None: ...
    async def relearn(self, client: WorkerClient, seconds: float) -> None: ...
    def settle_weights(self, updated: Sequence[Worker]) -> None: ...
    def take_out(self, worker: Worker, reason: str, epoch: str | None) -> None: ...
    async def close(self) -> None: ...


class Components(Protocol):
    """Builds the components of a router, and answers requests to the router itself."""

    accepts_clients: bool
    """True if clients connect to this process."""

    def registry(self, config: RouterConfig, on_drained: Callable[[Worker], None]) -> Registry: ...
    def health(self, config: RouterConfig, registry: Registry,
               on_ranks: Callable[[Worker, int], None] | None, on_role: Callable[[Worker, str], object]) -> Health: ...
    def dispatcher(self, config: RouterConfig, registry: Registry, metrics: Metrics, rng: Random,
                   suspect: Callable[[Worker, Failure], None]) -> Dispatcher: ...
    def admission(self, rules: AdmissionRules, loop: asyncio.AbstractEventLoop) -> AdmissionControl: ...
    def fail_calls(self, dispatcher: Dispatcher, worker: Worker) -> None:
        """Fails the calls that run on a worker."""
    async def apply_changes(self) -> None:
        """Returns once all processes act on what the registry says, and its loads are those of all of them."""
    def answer(self, router: ClusterView, request: Request) -> Response | Coroutine[Any, Any, Response]:
        """Answers a request to the router itself, now or later; raises ServingError."""
        ...


class LocalComponents:
    """The components of a router that is one process."""

    accepts_clients = True

    def registry(self, config: RouterConfig, on_drained: Callable[[Worker], None]) -> Registry:
        return Registry(failure_threshold=config.health.health_failure_threshold,
                        success_threshold=config.health.health_success_threshold,
                        circuit_rules=config.circuit.rules, on_drained=on_drained,
                        models=Models.from_args(config.workers))

    def health(self, config: RouterConfig, registry: Registry, on_ranks: Callable[[Worker, int], None] | None,
               on_role: Callable[[Worker, str], object]) -> Health:
        return HealthMonitor(config.health, registry, on_ranks=on_ranks, on_role=on_role)

    def dispatcher(self, config: RouterConfig, registry: Registry, metrics: Metrics, rng: Random,
                   suspect: Callable[[Worker, Failure], None]) -> Dispatcher:
        return Dispatcher(config, registry, metrics, rng, suspect)

    def admission(self, rules: AdmissionRules, loop: asyncio.AbstractEventLoop) -> AdmissionControl:
        return Admission(rules, loop.time)

    def fail_calls(self, dispatcher: Dispatcher, worker: Worker) -> None:
        dispatcher.fail_calls(worker)

    async def apply_changes(self) -> None:
        await asyncio.sleep(0)  # what was scheduled runs now

    def answer(self, router: ClusterView, request: Request) -> Response | Coroutine[Any, Any, Response]:
        return answer_locally(router, request)


def answer_locally(router: ClusterView, request: Request) -> Response | Coroutine[Any, Any, Response]:
    """Answers a request to the router itself in this process, now or later; raises ServingError."""
    route = admin_routes().get(request.path)
    if route is None:
        return serve_workers(router, request)
    methods, handler = route
    check_method(request, (*methods, b"HEAD") if b"GET" in methods else methods)
    return handler(router, request)
