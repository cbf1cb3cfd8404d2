"""Asking a worker something and waiting for the whole answer: for health checks and broadcasts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import httptools
import msgspec

from ...common.api.unreadable import UNREADABLE
from ..net.request import Request
from ..net.upstream_answer import AnswerHead, Failure
from .registry import Worker

_MOST_MODELS = 4096
"""Names that one worker may tell: a server of adapters has some hundreds."""

if TYPE_CHECKING:
    from ..relay.dispatcher import Dispatcher


class Answer(NamedTuple):
    """``status`` is 0 when no answer came; ``detail`` says why then."""

    status: int
    body: bytes = b""
    detail: str = ""
    refused: bool = False
    silent: bool = False
    """Whether the time was up."""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def json_object(self) -> dict[str, Any]:
        """The body as a JSON object; empty when it is none."""
        value = self.json()
        return value if isinstance(value, dict) else {}

    def json(self) -> Any:
        """The body's JSON value; None when it is none, and of answers that are not ``ok``."""
        try:
            return msgspec.json.decode(self.body) if self.ok else None
        except UNREADABLE:
            return None


class _Collector:
    """A sink that keeps the answer and wakes whoever waits for it."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def answer_head(self, head: AnswerHead) -> None:
        self._status = head.status
        self._parser.feed_data(head.data)

    def answer_data(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def answer_end(self, *, reusable: bool) -> None:
        self._resolve(Answer(self._status, b"".join(self._body)))

    def answer_lost(self, failure: Failure) -> None:
        self._resolve(Answer(0, detail=failure.detail, refused=failure.refused,
                             silent=failure.reason in ("silent", "hung")))

    def _resolve(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


async def ask(dispatcher: Dispatcher, worker: Worker, request: Request, timeout: float) -> Answer:
    """Send ``request`` to a worker; returns within ``timeout`` seconds, whatever the worker does."""
    collector = _Collector()
    call = dispatcher.send(worker, request, request.body, collector)
    late = Failure("silent", f"{worker.url} did not answer within {timeout:g} s")
    timer = dispatcher.loop.call_later(timeout, collector.answer_lost, late)
    try:  # No wait_for: up to Python 3.11 it may swallow a cancellation that comes with the answer.
        return await collector.answer
    finally:
        timer.cancel()
        call.cancel()


async def ask_models(dispatcher: Dispatcher, worker: Worker, timeout: float) -> None:
    """Ask a worker which models it serves, and note them; what a worker that cannot tell said before still holds."""
    told = (await ask(dispatcher, worker, get("/v1/models"), timeout)).json_object().get("data")
    if isinstance(told, list):
        cards = [card for card in told if isinstance(card, dict) and isinstance(card.get("id"), str) and card["id"]]
        dispatcher.registry.learn_models(worker, cards[:_MOST_MODELS])


def get(target: str) -> Request:
    """A request of the router's own."""
    request = Request(b"GET", target.encode())
    request.request_id = b"router"
    return request
