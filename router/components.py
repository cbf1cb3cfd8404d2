"""What a router is made of. In one of several processes (see ``processes``) some of it is shared with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Protocol

from .admin.endpoints import ADMIN_ROUTES
from .admin.worker_routes import serve_workers
from .admission.admission import Admission, AdmissionRules
from .config import RouterConfig
from .monitoring.cluster_view import ClusterView
from .monitoring.health import HealthMonitor
from .net.request import Request
from .net.responses import Response, check_method
from .net.upstream_answer import Failure
from .obs.metrics import Metrics
from .relay.dispatcher import Dispatcher
from .workers.registry import Registry, Worker


class Health(Protocol):
    """Decides which workers take traffic."""

    def watch(self, worker: Worker, dispatcher: Dispatcher) -> None: ...
    def unwatch(self, worker: Worker) -> None: ...
    def suspect(self, worker: Worker, failure: Failure) -> None: ...
    async def close(self) -> None: ...


class Components:
    """The parts of a router that is one process."""

    accepts = True
    """Whether clients connect to this process."""

    def registry(self, config: RouterConfig, on_drained: Callable[[Worker], None]) -> Registry:
        return Registry(failure_threshold=config.health.health_failure_threshold,
                        success_threshold=config.health.health_success_threshold,
                        circuit_rules=config.circuit.rules, on_drained=on_drained, models=config.workers.models)

    def health(self, config: RouterConfig, registry: Registry,
               on_ranks: Callable[[Worker, int], None] | None) -> Health:
        return HealthMonitor(config.health, registry, on_ranks=on_ranks)

    def dispatcher(self, config: RouterConfig, registry: Registry, metrics: Metrics, rng: Random,
                   suspect: Callable[[Worker, Failure], None]) -> Dispatcher:
        return Dispatcher(config, registry, metrics, rng, suspect)

    def admission(self, rules: AdmissionRules, loop: asyncio.AbstractEventLoop) -> Admission:
        return Admission(rules, loop.time)

    def answer(self, router: ClusterView, request: Request) -> Response | Coroutine[Any, Any, Response]:
        """Answer a request to the router itself, now or later; raises ServingError."""
        route = ADMIN_ROUTES.get(request.path)
        if route is None:
            return serve_workers(router, request)
        methods, handler = route
        check_method(request, (*methods, b"HEAD") if b"GET" in methods else methods)
        return handler(router, request)
