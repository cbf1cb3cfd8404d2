"""The wait of early requests for the workers' first health checks, instead of a 503.

A first check ends within some seconds whatever a worker does, so no wait lasts longer; a worker that is still loading
its model fails it, and then requests get 503 as usual.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ...common.api.errors import ServingError
from ..net.http_server import ClientConnection
from ..net.request import Request
from ..workers.registry import Registry, Role


class FirstChecks:
    """The requests that wait; ``serve`` gets each as soon as the checks decide if there is a worker for it."""

    def __init__(self, registry: Registry, serve: Callable[[ClientConnection, Request], None],
                 refuse: Callable[[ClientConnection, Request, ServingError], None]):
        self._registry = registry
        self._serve = serve
        self.refuse = refuse
        self._waiting: dict[WaitingRequest, None] = {}
        self._wake: asyncio.Handle | None = None
        registry.listeners.append(self._changed)

    def __len__(self) -> int:
        return len(self._waiting)

    def wait(self, connection: ClientConnection, request: Request, roles: Sequence[Role], model: str) -> bool:
        """Let a request wait if a running check may find a worker for it; returns True if it waits.

        It does if a role has no worker yet, or if the model's name is unknown and may be served by a worker that the
        router was started with and that has not reported its models.
        """
        models, unchecked = self._registry.models, self._registry.unchecked
        known = models.knows(model)
        group = models.group(models.real_name(model)) if known else None
        missing = [role for role in roles if not self._registry.available(role, group)]
        may_know = bool(model) and not known and any(worker.named for worker in unchecked)
        may_serve = bool(missing) and any(
            models.serves(worker, group) and (worker.role in missing or worker.asks_role) for worker in unchecked)
        if not may_know and not may_serve:
            return False
        connection.handler = waiting = WaitingRequest(self, connection, request)
        self._waiting[waiting] = None
        return True

    def leave(self, waiting: WaitingRequest) -> None:
        self._waiting.pop(waiting, None)

    def _changed(self) -> None:
        if self._waiting and self._wake is None:
            self._wake = asyncio.get_running_loop().call_soon(self._serve_all)

    def _serve_all(self) -> None:
        self._wake = None
        all_waiting, self._waiting = self._waiting, {}
        for waiting in all_waiting:
            self._serve(waiting.connection, waiting.request)


class WaitingRequest:
    """A waiting request, as its connection's handler."""

    __slots__ = ("_queue", "connection", "request")

    def __init__(self, queue: FirstChecks, connection: ClientConnection, request: Request):
        self._queue = queue
        self.connection = connection
        self.request = request

    def cancel(self) -> None:
        self._queue.leave(self)

    def expire(self, error: ServingError) -> None:
        self._queue.leave(self)
        self._queue.refuse(self.connection, self.request, error)

    def pause(self) -> None:
        pass  # Nothing is produced.

    def resume(self) -> None:
        pass
