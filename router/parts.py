"""What a router is made of. In one of several processes (see ``processes``) some of it is shared with the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Protocol

from .admin import ADMIN_ROUTES
from .admission import Admission, AdmissionRules
from .answer import Failure
from .cluster import Cluster
from .config import RouterConfig
from .dispatch import Dispatcher
from .health import HealthMonitor
from .metrics import Metrics
from .registry import Registry, Worker
from .request import Request
from .wire import Response, check_method
from .worker_routes import serve_workers


class Health(Protocol):
    """Decides which workers take traffic."""

    def watch(self, worker: Worker, dispatcher: Dispatcher) -> None: ...
    def unwatch(self, worker: Worker) -> None: ...
    def suspect(self, worker: Worker, failure: Failure) -> None: ...
    async def close(self) -> None: ...


class Parts:
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

    def answer(self, router: Cluster, request: Request) -> Response | Coroutine[Any, Any, Response]:
        """Answer a request to the router itself, now or later; raises ServingError."""
        route = ADMIN_ROUTES.get(request.path)
        if route is None:
            return serve_workers(router, request)
        methods, handler = route
        check_method(request, (*methods, b"HEAD") if b"GET" in methods else methods)
        return handler(router, request)
