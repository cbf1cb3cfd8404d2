"""Requests that are on their way in, and the time that they may take for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ...api.errors import ServingError

BODY_BYTES_PER_SECOND = 16 * 1024
_LOOK_SECONDS = 1.0
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class SlowRequest(ServingError):
    """The client stopped in the middle of its request, or sends it too slowly."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class SlowBody(web.RequestPayloadError):
    """What a handler meets that reads on."""


class Arrivals:
    """Ends connections whose first request has no head after ``header_seconds``, and gives up bodies after
    ``body_seconds`` and one more for each BODY_BYTES_PER_SECOND that have come. 0: no limit.

    A later head is waited for as long as an idle connection is kept, which aiohttp sees to.
    """

    def __init__(self, header_seconds: float, body_seconds: float):
        self._header_seconds = header_seconds
        self._body_seconds = body_seconds
        self._waiting: dict[Any, float] = {}  # until when, by connection; in that order

    def connecting(self, make: Callable[[], web.RequestHandler]) -> web.RequestHandler:
        """A protocol for a new connection."""
        handler = make()
        if self._header_seconds:
            self._waiting[handler] = asyncio.get_running_loop().time() + self._header_seconds
        return handler

    def headed(self, request: web.Request) -> None:
        """A request's head is here."""
        if self._waiting:
            self._waiting.pop(request.protocol, None)
        if self._body_seconds and not request.content.is_eof():
            _Body(request, self._body_seconds)

    async def watch(self) -> None:
        """End what is overdue, until cancelled."""
        while True:
            await asyncio.sleep(min(_LOOK_SECONDS, self._header_seconds / 4 or _LOOK_SECONDS))
            now = asyncio.get_running_loop().time()
            while self._waiting and (first := next(iter(self._waiting.items())))[1] <= now:
                handler = first[0]
                del self._waiting[handler]
                if handler.transport is not None:
                    handler.transport.write(_TOO_SLOW)
                    handler.force_close()


class _Body:
    def __init__(self, request: web.Request, seconds: float):
        self._loop = asyncio.get_running_loop()
        self._content = request.content
        self._until = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._until, self._look)
        self._content.on_eof(self._cancel)

    def _cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        until = self._until + self._content.total_bytes / BODY_BYTES_PER_SECOND
        if self._loop.time() < until:
            self._timer = self._loop.call_at(until, self._look)
        else:
            self._content.set_exception(SlowBody())
