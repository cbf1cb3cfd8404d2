"""Stream of the outputs of requests that were sent to the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from ..api.errors import ServingError
from ..api.messages import Generate, Output


class Engine(Protocol):
    """Accepts a stream's requests, and then calls the stream's ``put`` and ``fail``."""

    def submit(self, stream: OutputStream, requests: Sequence[Generate]) -> None: ...

    def abandon(self, rid: str) -> None: ...


class OutputStream:
    """Outputs of requests that were sent together, until each has ended. Use as a context manager.

    Leaving it aborts, silently, the requests that have not ended: a client that left costs the engine nothing more.
    """

    def __init__(self, client: Engine, requests: Sequence[Generate]):
        self._client = client
        self._requests = requests
        self._live = {request.rid for request in requests}
        self._arrived: list[Output] = []
        self._error: ServingError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> OutputStream:
        self._client.submit(self, self._requests)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for rid in list(self._live):
            self.abort(rid)

    @property
    def live(self) -> bool:
        """True while ``next`` has more to return: outputs, or the error that ended a request."""
        return bool(self._live or self._arrived or self._error)

    async def next(self) -> list[Output]:
        """All outputs that have arrived; waits for a first one. Raises the ServingError that ended a request,
        after the outputs that preceded it."""
        if not self._arrived and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived, self._arrived = self._arrived, []
        if not arrived and self._error is not None:
            raise self._error
        return arrived

    def abort(self, rid: str) -> None:
        """End one request whose answer is complete already, or no longer needed. It yields no further outputs."""
        if rid in self._live:
            self._live.discard(rid)
            self._client.abandon(rid)
        self._arrived = [output for output in self._arrived if output.rid != rid]

    # Called by the client.

    def put(self, output: Output) -> None:
        self._arrived.append(output)
        if output.finish is not None:
            self._live.discard(output.rid)
        self._wake()

    def fail(self, rid: str, error: ServingError) -> None:
        self._live.discard(rid)
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
