"""A chat's chunks, told as the events of another API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from ..openai.responses import ChatChunk
from .chat_run import ChatRun


class Teller(Protocol):
    """The events of one stream, encoded."""

    def begin(self) -> list[bytes]: ...

    def say(self, chunk: ChatChunk) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...

    def fail(self, error: Exception) -> bytes:
        """The last event of a stream that breaks."""


async def retold(run: ChatRun, teller: Teller) -> AsyncGenerator[bytes, None]:
    """The stream begins with the first chunk: what fails before it has a status of its own."""
    begun = False
    try:
        async with aclosing(run.chunks()) as chunks:
            async for ready in chunks:
                said = [] if begun else teller.begin()
                begun = True
                for chunk in ready:
                    said += teller.say(chunk)
                if not run.live:
                    said += teller.end()
                if said:
                    yield b"".join(said)
    except Exception as error:
        if not begun or isinstance(error, ConnectionError):
            raise
        yield teller.fail(error)
