"""The router's own requests to a worker, with their complete responses: for health checks and broadcasts."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, Protocol

import httptools
import msgspec

from ...common.api.unreadable import UNREADABLE
from ..net.body import Body
from ..net.request import Request
from ..net.upstream import Call
from ..net.upstream_pool import UpstreamPool
from ..net.upstream_response import Failure, ResponseHead, ResponseSink
from .registry import Registry, Worker

_MAX_MODELS = 4096
"""Models that one worker may report: a server of adapters has some hundreds."""


class WorkerClient(Protocol):
    """Sends the router's own requests to workers; the dispatcher is one."""

    loop: asyncio.AbstractEventLoop
    registry: Registry

    def send(self, worker: Worker, request: Request, body: Body, sink: ResponseSink) -> Call: ...
    def pool(self, worker: Worker) -> UpstreamPool: ...
    def fail_silent_calls(self, worker: Worker) -> None:
        """Fails the calls for which a hung worker has sent no byte for as long as a health check may take."""


class WorkerResponse(NamedTuple):
    """A complete response. ``status`` is 0 if none came, and ``detail`` then has the reason."""

    status: int
    body: bytes = b""
    detail: str = ""
    refused: bool = False
    silent: bool = False
    """True if the worker did not answer in time."""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object; empty if it is none."""
        value = self.json()
        return value if isinstance(value, dict) else {}

    def json(self) -> Any:
        """The body's JSON value; None if it is none, and for responses that are not ``ok``."""
        try:
            return msgspec.json.decode(self.body) if self.ok else None
        except UNREADABLE:
            return None


class _Collector:
    """A sink that collects the response and sets the future ``response``."""

    def __init__(self) -> None:
        self.response: asyncio.Future[WorkerResponse] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_response_head(self, head: ResponseHead) -> None:
        self._status = head.status
        self._parser.feed_data(head.data)

    def on_response_data(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_response_end(self, *, reusable: bool) -> None:
        self._resolve(WorkerResponse(self._status, b"".join(self._body)))

    def on_response_lost(self, failure: Failure) -> None:
        self._resolve(WorkerResponse(0, detail=failure.detail, refused=failure.refused,
                                     silent=failure.reason in ("silent", "hung")))

    def _resolve(self, response: WorkerResponse) -> None:
        if not self.response.done():
            self.response.set_result(response)


async def ask(client: WorkerClient, worker: Worker, request: Request, timeout: float) -> WorkerResponse:
    """Send ``request`` to a worker; returns within ``timeout`` seconds, whatever the worker does."""
    collector = _Collector()
    call = client.send(worker, request, request.body, collector)
    late = Failure("silent", f"{worker.url} did not answer within {timeout:g} s")
    timer = client.loop.call_later(timeout, collector.on_response_lost, late)
    try:  # No wait_for: up to Python 3.11 it may swallow a cancellation that comes with the response.
        return await collector.response
    finally:
        timer.cancel()
        call.cancel()


async def ask_models(client: WorkerClient, worker: Worker, timeout: float) -> None:
    """Ask a worker for its models, and register them; without a valid response, the former ones stay."""
    models = (await ask(client, worker, get("/v1/models"), timeout)).json_object().get("data")
    if isinstance(models, list):
        cards = [card for card in models if isinstance(card, dict) and isinstance(card.get("id"), str) and card["id"]]
        client.registry.learn_models(worker, cards[:_MAX_MODELS])


def get(target: str) -> Request:
    """A GET request of the router's own."""
    request = Request(b"GET", target.encode())
    request.request_id = b"router"
    return request
