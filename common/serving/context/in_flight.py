"""The HTTP requests that are being answered, and their end where the server stops before them."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from ...api.errors import WorkerUnavailable
from ...engine_client.client import EngineClient

_FINAL_ERROR_SECONDS = 0.5  # in which the error of a request that was cut must be sent


class InFlightRequests:
    """The open HTTP requests of a server.

    ``begin`` and ``end`` surround each request, in its task. ``cut``: the server has given up those that remain.
    """

    def __init__(self) -> None:
        self.cut = False
        self._requests: dict[asyncio.Task[object], web.Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def begin(self, task: asyncio.Task[object], request: web.Request) -> None:
        self._requests[task] = request

    def end(self, task: asyncio.Task[object]) -> None:
        self._requests.pop(task, None)

    @property
    def num_received(self) -> int:
        """Requests whose bodies have arrived, which a stopping server still answers."""
        return sum(request.content.is_eof() for request in self._requests.values())

    async def give_up(self, client: EngineClient) -> int:
        """Ends all requests with an error, and gives the errors a moment to be sent; returns the number of requests.

        A request that waits for the engine fails there, so that its handler formats the error, in a stream too. One
        that waits for anything else is cancelled; ``app`` answers it.
        """
        count = len(self)
        self.cut = True
        client.fail_all(shut_down())
        await self._empty()
        for task in list(self._requests):
            task.cancel()
        await self._empty()
        return count

    async def _empty(self) -> None:
        if self._requests:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait(self._requests, timeout=_FINAL_ERROR_SECONDS)


def shut_down() -> WorkerUnavailable:
    return WorkerUnavailable("The server was shut down before the answer was complete.", retry_after=1.0)
