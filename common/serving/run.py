"""One request of an OpenAI API from its decoded body to its answer, as structs that a route encodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

import msgspec
from aiohttp import web

from ..api.messages import Generate
from .context import ServingContext
from .generation import Choice
from .lifecycle.prompt_pages import note_pages
from .protocol.continuation import HEADER
from .protocol.responses import DONE, encode, event
from .sse import stream_events
from .web import json_bytes


class _Streamable(Protocol):
    @property
    def stream(self) -> bool | None: ...


Body = TypeVar("Body", bound=_Streamable)
Planned = TypeVar("Planned", bound=_Streamable, contravariant=True)
Whole = TypeVar("Whole", covariant=True)
Chunk = TypeVar("Chunk", bound=msgspec.Struct, covariant=True)


class Answer(Protocol[Whole, Chunk]):
    """Tells one generation in an API's structs, either whole or in chunks."""

    def whole(self, choices: Sequence[Choice]) -> Whole: ...

    def begin(self, choices: Sequence[Choice]) -> None:
        """Before any chunk; a choice may stand behind output that another server told."""

    def gained(self, choice: Choice) -> Sequence[Chunk]:
        """The chunks of what a choice gained; takes its delta."""

    def end(self, choices: Sequence[Choice]) -> Sequence[Chunk]:
        """The chunks behind those of all choices."""


class Run(Generic[Whole, Chunk]):
    """A request that is planned: ask it for either ``whole`` or ``chunks``, once."""

    def __init__(self, front: ServingContext, requests: list[Generate], answer: Answer[Whole, Chunk], *, arrived: float,
                 continued: Sequence[int] = ()):
        """``arrived``: when the HTTP request came, on the monotonic clock in seconds. ``continued``: output of the only
        request that was answered elsewhere."""
        self.requests = requests
        self._answer = answer
        self._interval = front.config.http.stream_interval
        self._generation = front.generation(requests, arrived, continued)

    @property
    def live(self) -> bool:
        """Whether more chunks are to come."""
        return self._generation.live

    async def whole(self) -> Whole:
        """Raises the ServingError of a choice that fails."""
        with self._generation as generation:
            return self._answer.whole(await generation.complete())

    async def chunks(self) -> AsyncGenerator[list[Chunk], None]:
        """Chunks as they come, those that are ready together in one list; raises the ServingError of a choice.

        The last list (``live`` is False then) holds all of the end: send it in one piece, so that a stream that breaks
        has told either all of its end or nothing. Close the generator to abort what has not ended.
        """
        with self._generation as generation:
            self._answer.begin(generation.choices)
            ready: list[Chunk] = []
            async for gained in generation.deltas(self._interval):
                for choice in gained:
                    ready += self._answer.gained(choice)
                if ready and generation.live:
                    yield ready
                    ready = []
            yield ready + [*self._answer.end(generation.choices)]
            await asyncio.sleep(0)  # streams that end in one step tell their last tokens before any of them is closed


class Planner(Protocol[Planned]):
    """Checks a request and makes its run; raises ServingError."""

    def __call__(self, front: ServingContext, body: Planned, *, arrived: float, with_ids: bool) -> Awaitable[Run]: ...


async def respond(front: ServingContext, request: web.Request, decode: Callable[[bytes], Body],
                  plan: Planner[Body]) -> web.StreamResponse:
    """All of a route whose answers are sent as they are: JSON, or server-sent events with ``[DONE]`` behind."""
    arrived = time.monotonic()
    with front.counting_refusals():
        front.serving_tokenizer()  # a server that is starting reads no bodies
        body = decode(await request.read())
        run = await plan(front, body, arrived=arrived, with_ids=HEADER in request.headers)
        note_pages(front, request, run.requests)
    if body.stream:
        return await stream_events(request, _events(run))
    return json_bytes(encode(await run.whole()))


async def _events(run: Run) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.chunks()) as chunks:
        async for ready in chunks:
            yield b"".join(map(event, ready)) + (b"" if run.live else DONE)
