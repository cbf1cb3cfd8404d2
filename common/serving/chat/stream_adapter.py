"""Chats of APIs other than chat completions: their requests become chats, and a chat's chunks become their events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from aiohttp import web

from ...api.errors import InvalidRequest
from ..context.generation import refuse_aborted
from ..context.serving_context import ServingContext
from ..protocol.continuation import HEADER, Continuation, ResponseHeader
from ..protocol.encoding import encode
from ..respond import record_prompt_pages
from ..sse import client_error, stream_events
from ..web import json_bytes, log_failure
from .handler import PlannedChat, plan_chat
from .schema import ChatChoice, ChatChunk, ChatCompletion, ChatDelta, ChatRequest, check_chat


class StreamAdapter(Protocol):
    """Translates one chat's answer, in full or as encoded events."""

    def full(self, choice: ChatChoice, completion: ChatCompletion) -> msgspec.Struct:
        """The answer of a chat's only choice."""

    def start(self) -> list[bytes]:
        """The events before the first chunk's."""

    def resume(self, continued: list[ChatDelta]) -> None:
        """Called instead of ``start`` where another server sent the beginning."""

    def delta(self, chunk: ChatChunk) -> list[bytes]:
        """The events of one chunk."""

    def finish(self) -> list[bytes]:
        """The events that follow the last chunk's."""

    def fail(self, error: Exception) -> bytes:
        """The last event of a stream that breaks."""


class _Body(Protocol):
    model: str | None
    stream: bool | None
    continuation: Continuation | None


Body = TypeVar("Body", bound=_Body)


@dataclass(frozen=True)
class ChatApi(Generic[Body]):
    """An API whose requests are translated into chats.

    ``adapter`` gets the body, the answer's header and the number of prompt tokens; ``translate_error`` puts an error
    about the chat's fields into the API's own."""

    decode: Callable[[bytes], Body]
    as_chat: Callable[[Body], ChatRequest]
    adapter: Callable[[Body, ResponseHeader, int], StreamAdapter]
    id_prefix: str
    translate_error: Callable[[InvalidRequest], InvalidRequest] = lambda error: error


async def respond_adapted(context: ServingContext, request: web.Request, api: ChatApi[Body]) -> web.StreamResponse:
    """Serves a route of ``api``: JSON, or the API's own events."""
    arrived = time.monotonic()
    with context.telemetry.counting_refusals():
        context.status.check_serving()  # a server that is starting reads no bodies
        body = api.decode(await request.read())
        with_ids = HEADER in request.headers
        header = ResponseHeader.of(body, api.id_prefix, context.model.name)
        try:
            run = await plan_chat(context, check_chat(api.as_chat(body)), arrived=arrived, with_ids=with_ids,
                                  name=header.id)
        except InvalidRequest as error:
            raise api.translate_error(error) from None
        record_prompt_pages(context, request, run.requests)
    adapter = api.adapter(body, header, len(run.requests[0].input_ids))
    if body.stream:
        resumed = body.continuation is not None
        return await stream_events(request, _events(run, adapter, resumed=resumed, with_ids=with_ids))
    completion = await run.full()
    refuse_aborted(choice.finish_reason for choice in completion.choices)
    return json_bytes(encode(adapter.full(completion.choices[0], completion)))


async def _events(run: PlannedChat, adapter: StreamAdapter, *, resumed: bool, with_ids: bool) -> AsyncGenerator[bytes,
                                                                                                                None]:
    """The stream begins with the first chunk: an error before it has an HTTP status of its own.

    ``resumed``: another server sent the beginning. ``with_ids``: token ids, and the error that ends a stream, are sent
    to a router in comments (see ``protocol/continuation.py``).
    """
    started = False
    try:
        async with aclosing(run.chunks()) as chunks:
            async for ready in chunks:
                events: list[bytes] = []
                if not started and resumed:
                    adapter.resume(run.continued_deltas)
                elif not started:
                    events += adapter.start()
                started = True
                refuse_aborted(choice.finish_reason for chunk in ready for choice in chunk.choices)
                for chunk in ready:
                    events += adapter.delta(chunk)
                if not run.live:
                    events += adapter.finish()
                ids = [token for chunk in ready for choice in chunk.choices for token in choice.token_ids or ()]
                if ids:
                    events.append(_comment({"token_ids": ids}))
                if events:
                    yield b"".join(events)
    except Exception as error:
        if not started or isinstance(error, ConnectionError):
            raise
        shown = client_error(error)
        log_failure(shown, rid=run.requests[0].rid)
        yield adapter.fail(shown) + (_comment(shown.to_openai()) if with_ids else b"")


def _comment(value: Any) -> bytes:
    return b": " + encode(value) + b"\n\n"
