"""A worker's way to the main process."""

from __future__ import annotations

import asyncio
import itertools

from ...api.errors import WorkerUnavailable
from ...api.grammar import GrammarSpec
from ...api.link import Link
from ...api.messages import FromEngine, ToEngine
from ...tokenizer.tokenizer import Tokenizer
from .messages import GrammarReady, PrepareGrammar


class LinkChannel:
    """The main process as the engine of an EngineClient, which is handed the messages instead of receiving them."""

    def __init__(self, link: Link):
        self._link = link

    def send(self, message: ToEngine) -> None:
        self._link.send(message)

    def drop_unsent(self) -> None:
        pass

    async def receive(self) -> FromEngine:
        raise NotImplementedError

    def close(self) -> None:
        pass


class RemoteGrammars:
    """Has grammars prepared by the main process."""

    def __init__(self, link: Link):
        self._link = link
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}

    async def prepare(self, spec: GrammarSpec, tokenizer: Tokenizer, param: str | None, client: str = "") -> None:
        """Returns when a request with this grammar may be sent; raises ServingError."""
        number = next(self._numbers)
        ready = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._link.send(PrepareGrammar(number, spec, param, client))
            await ready
        finally:
            del self._waiting[number]

    def on_ready(self, message: GrammarReady) -> None:
        ready = self._waiting.get(message.seq)
        if ready is None or ready.done():
            return
        if message.error is None:
            ready.set_result(None)
        else:
            ready.set_exception(message.error.rebuild())

    def close(self) -> None:
        for ready in self._waiting.values():
            if not ready.done():
                ready.set_exception(WorkerUnavailable("The server is shutting down."))
