"""One request of an OpenAI API from its decoded body to its answer, as structs that a handler encodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from aiohttp import web

from ..api.kv_events import PROMPT_PAGES_HEADER, encode_pages
from ..api.messages import Generate
from .context.generation import Choice
from .context.serving_context import ServingContext
from .context.sessions import SessionTurn
from .protocol.continuation import HEADER
from .protocol.encoding import DONE, encode, event
from .sse import stream_events
from .web import json_bytes


class _Streamable(Protocol):
    @property
    def stream(self) -> bool | None: ...


Body = TypeVar("Body", bound=_Streamable)
Planned = TypeVar("Planned", bound=_Streamable, contravariant=True)
Whole = TypeVar("Whole", covariant=True)
Chunk = TypeVar("Chunk", bound=msgspec.Struct, covariant=True)


class ResponseFormatter(Protocol[Whole, Chunk]):
    """Formats one generation in an API's structs, either in full or as chunks."""

    def full(self, choices: Sequence[Choice]) -> Whole:
        """The answer of choices that have all ended."""

    def start(self, choices: Sequence[Choice]) -> None:
        """Called before any chunk; a choice may continue output that another server sent."""

    def delta(self, choice: Choice) -> Sequence[Chunk]:
        """The chunks of a choice's new output; takes its delta."""

    def finish(self, choices: Sequence[Choice]) -> Sequence[Chunk]:
        """The chunks that follow those of all choices."""


class PlannedResponse(Generic[Whole, Chunk]):
    """A planned request: ask it for either ``full`` or ``chunks``, once."""

    def __init__(self, context: ServingContext, requests: list[Generate], formatter: ResponseFormatter[Whole, Chunk],
                 *, arrived: float, continued: Sequence[int] = (), intervals: Sequence[int | None] = (),
                 session: SessionTurn | None = None):
        """``arrived``: the HTTP request's arrival, on the monotonic clock in seconds. ``continued``: output of the only
        request that another server answered. ``intervals``: the tokens of an event of each request, where they are not
        --stream-interval's. ``session``: what stores the answer."""
        self.requests = requests
        self._formatter = formatter
        default = context.config.http.stream_interval
        self._intervals = [given or default for given in intervals or [None] * len(requests)]
        self._session = session
        self._generation = context.generation(requests, arrived, continued)

    @property
    def live(self) -> bool:
        """True while more chunks are to come."""
        return self._generation.live

    async def full(self) -> Whole:
        """The complete answer; raises the ServingError of a choice that fails."""
        with self._generation as generation:
            choices = await generation.complete()
            self._store(choices)
            return self._formatter.full(choices)

    async def chunks(self) -> AsyncGenerator[list[Chunk], None]:
        """Chunks as they come, those that are ready together in one list; raises the ServingError of a choice.

        The last list (``live`` is False then) holds the complete end: send it in one write, so that a stream that
        breaks has sent either all of its end or nothing. Close the generator to abort what has not ended.
        """
        with self._generation as generation:
            self._formatter.start(generation.choices)
            ready: list[Chunk] = []
            async for updated in generation.deltas(self._intervals):
                for choice in updated:
                    ready += self._formatter.delta(choice)
                if ready and generation.live:
                    yield ready
                    ready = []
            self._store(generation.choices)
            yield ready + [*self._formatter.finish(generation.choices)]
            await asyncio.sleep(0)  # streams that end in one step send their last tokens before any of them is closed

    def _store(self, choices: Sequence[Choice]) -> None:
        if self._session is not None:
            self._session.store(choices[0].rid, choices[0].token_ids)


class PlanRequest(Protocol[Planned]):
    """Checks a request body and plans it; raises ServingError."""

    def __call__(self, context: ServingContext, body: Planned, *, arrived: float,
                 with_ids: bool) -> Awaitable[PlannedResponse[Any, Any]]: ...


async def respond(context: ServingContext, request: web.Request, decode: Callable[[bytes], Body],
                  plan: PlanRequest[Body]) -> web.StreamResponse:
    """Serves a route whose answers are sent as they are: JSON, or server-sent events that end with ``[DONE]``."""
    arrived = time.monotonic()
    with context.telemetry.counting_refusals():
        context.status.check_serving()  # a server that is starting reads no bodies
        body = decode(await request.read())
        run = await plan(context, body, arrived=arrived, with_ids=HEADER in request.headers)
        record_prompt_pages(context, request, run.requests)
    if body.stream:
        return await stream_events(request, _events(run))
    return json_bytes(encode(await run.full()))


async def _events(run: PlannedResponse[Any, Any]) -> AsyncGenerator[bytes, None]:
    async with aclosing(run.chunks()) as chunks:
        async for ready in chunks:
            yield b"".join(map(event, ready)) + (b"" if run.live else DONE)


# A router that follows the server's KV events knows which pages are cached. It cannot compute the page hashes of a text
# or a chat: that takes this server's template and tokenizer. So it requests them once for each new text.


def record_prompt_pages(context: ServingContext, request: web.Request, requests: Sequence[Generate]) -> None:
    """Stores the first prompt's page hashes for the response's head, where the request asks for them."""
    if PROMPT_PAGES_HEADER in request.headers:
        first = requests[0]
        ids = first.input_ids if first.input_embeds is None else []  # pages of embeddings are never cached
        request[PROMPT_PAGES_HEADER] = encode_pages(ids, context.config.cache.page_size, first.namespace.seed)


async def add_prompt_pages(request: web.Request, response: web.StreamResponse) -> None:
    """Adds the stored page hashes to a response's head; a signal handler of ``on_response_prepare``."""
    if (pages := request.get(PROMPT_PAGES_HEADER)) is not None:
        response.headers[PROMPT_PAGES_HEADER] = pages
