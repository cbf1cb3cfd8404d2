"""The HTTP requests that are being answered, and how they end where the server ends before them."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from ...api.errors import WorkerUnavailable
from ...engine_client.client import EngineClient

_LAST_WORDS_SECONDS = 0.5  # in which a request that was cut is to be told so


class InFlight:
    """``begin`` and ``end`` surround each request, in its task. ``cut``: the server has given up those that remain."""

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
        """Requests whose bodies have come: those that a server that stops still answers."""
        return sum(request.content.is_eof() for request in self._requests.values())

    async def give_up(self, client: EngineClient) -> int:
        """End all requests with an error, and give the errors a moment to leave; returns how many there were.

        What waits for the engine is failed there, so that each API tells of it in its own words, in a stream too. What
        waits for anything else is cancelled; ``app`` makes an answer of that.
        """
        count = len(self)
        self.cut = True
        client.fail_open(shut_down())
        await self._empty()
        for task in list(self._requests):
            task.cancel()
        await self._empty()
        return count

    async def _empty(self) -> None:
        if self._requests:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait(self._requests, timeout=_LAST_WORDS_SECONDS)


def shut_down() -> WorkerUnavailable:
    return WorkerUnavailable("The server was shut down before the answer was complete.", retry_after=1.0)
