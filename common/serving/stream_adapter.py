"""A chat's chunks, told as the events of another API."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from .chat.run import ChatRun
from .generation import refuse_aborted
from .protocol.responses import ChatChoice, ChatChunk, ChatCompletion, ChatDelta, encode
from .sse import shown
from .web import note_failure


class StreamAdapter(Protocol):
    """The events of one stream, encoded."""

    def begin(self) -> list[bytes]: ...

    def resume(self, told: list[ChatDelta]) -> None:
        """In place of ``begin``, where another server told the beginning."""

    def say(self, chunk: ChatChunk) -> list[bytes]: ...

    def end(self) -> list[bytes]: ...

    def fail(self, error: Exception) -> bytes:
        """The last event of a stream that breaks."""


async def retold_whole(run: ChatRun) -> tuple[ChatChoice, ChatCompletion]:
    """The only choice of a chat's answer, and the answer; raises AbortRequested for a part of one."""
    answer = await run.whole()
    refuse_aborted(choice.finish_reason for choice in answer.choices)
    return answer.choices[0], answer


async def retold(run: ChatRun, teller: StreamAdapter, *, resumed: bool, with_ids: bool) -> AsyncGenerator[bytes, None]:
    """The stream begins with the first chunk: what fails before it has a status of its own.

    ``resumed``: another server told the beginning. ``with_ids``: token ids, and the error that ends a stream, are told
    in comments for a router (see ``openai/continuation.py``).
    """
    begun = False
    try:
        async with aclosing(run.chunks()) as chunks:
            async for ready in chunks:
                said: list[bytes] = []
                if not begun and resumed:
                    teller.resume(run.told_before)
                elif not begun:
                    said += teller.begin()
                begun = True
                refuse_aborted(choice.finish_reason for chunk in ready for choice in chunk.choices)
                for chunk in ready:
                    said += teller.say(chunk)
                if not run.live:
                    said += teller.end()
                ids = [token for chunk in ready for choice in chunk.choices for token in choice.token_ids or ()]
                if ids:
                    said.append(_comment({"token_ids": ids}))
                if said:
                    yield b"".join(said)
    except Exception as error:
        if not begun or isinstance(error, ConnectionError):
            raise
        told = shown(error)
        note_failure(told, rid=run.requests[0].rid)
        yield teller.fail(told) + (_comment(told.to_openai()) if with_ids else b"")


def _comment(value: Any) -> bytes:
    return b": " + encode(value) + b"\n\n"
