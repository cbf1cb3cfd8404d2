"""Timeouts for receiving the heads and bodies of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ...api.errors import ServingError

BODY_BYTES_PER_SECOND = 16 * 1024
_CHECK_SECONDS = 1.0
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class SlowRequest(ServingError):
    """A client stopped in the middle of its request, or sends it too slowly."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class SlowBody(web.RequestPayloadError):
    """Raised in a handler that reads a body that is overdue."""


class ClientTimeouts:
    """Closes connections whose first request has no head after ``header_seconds``, and fails bodies after
    ``body_seconds`` and one second more for each BODY_BYTES_PER_SECOND received. 0: no limit.

    Later heads are bounded by aiohttp's keep-alive timeout.
    """

    def __init__(self, header_seconds: float, body_seconds: float):
        self._header_seconds = header_seconds
        self._body_seconds = body_seconds
        self._deadlines: dict[Any, float] = {}  # by connection, the earliest first

    def connect(self, make: Callable[[], web.RequestHandler]) -> web.RequestHandler:
        """Makes the protocol of a new connection, and starts its timeout."""
        handler = make()
        if self._header_seconds:
            self._deadlines[handler] = asyncio.get_running_loop().time() + self._header_seconds
        return handler

    def on_head(self, request: web.Request) -> None:
        """Called with a request whose head has arrived; starts the timeout of its body."""
        if self._deadlines:
            self._deadlines.pop(request.protocol, None)
        if self._body_seconds and not request.content.is_eof():
            _BodyTimeout(request, self._body_seconds)

    async def watch(self) -> None:
        """Closes overdue connections, until cancelled."""
        while True:
            await asyncio.sleep(min(_CHECK_SECONDS, self._header_seconds / 4 or _CHECK_SECONDS))
            now = asyncio.get_running_loop().time()
            while self._deadlines and (first := next(iter(self._deadlines.items())))[1] <= now:
                handler = first[0]
                del self._deadlines[handler]
                if handler.transport is not None:
                    handler.transport.write(_TOO_SLOW)
                    handler.force_close()


class _BodyTimeout:
    """Fails the body of one request when it is overdue."""

    def __init__(self, request: web.Request, seconds: float):
        self._loop = asyncio.get_running_loop()
        self._content = request.content
        self._deadline = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._deadline, self._check)
        self._content.on_eof(self._cancel)

    def _cancel(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        deadline = self._deadline + self._content.total_bytes / BODY_BYTES_PER_SECOND
        if self._loop.time() < deadline:
            self._timer = self._loop.call_at(deadline, self._check)
        else:
            self._content.set_exception(SlowBody())
