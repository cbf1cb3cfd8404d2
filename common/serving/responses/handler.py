"""``/v1/responses``: a chat as items, answered at once or in the background, and stored for the next one."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from ...api.errors import Conflict, InvalidRequest
from ..context.response_store import ID_PREFIX, StoredResponse
from ..context.serving_context import ServingContext
from ..protocol.continuation import HEADER, ResponseHeader
from ..protocol.encoding import encode
from ..respond import record_prompt_pages
from ..sse import stream_events
from ..web import json_bytes, json_response
from . import background, items
from .request_tools import RequestTools
from .run import ResponseRun
from .schema import Conversation, InputItem, ResponseDeleted, ResponseRequest, decode_response

_BROKEN = ("failed", "cancelled")


async def responses(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """A chat as items."""
    arrived = time.monotonic()
    with context.telemetry.counting_refusals():
        context.status.check_serving()  # a server that is starting reads no bodies
        body = decode_response(await request.read())
        stored = _stores(context, body, request)
        before = _conversation_before(context, body)
        tools = RequestTools.of(body, context.tool_servers)
        header = ResponseHeader.of(body, ID_PREFIX, context.model.name)
        if body.continuation is None or body.continuation.id is None:
            header = header._replace(id=context.response_store.new_id())
        # A router cannot continue an answer with rounds of tools, nor one that belongs to its server.
        with_ids = HEADER in request.headers and not tools and not body.background
        run = ResponseRun(context, body, header, before, tools, with_ids=with_ids, stored=stored)
        await run.plan(arrived)
        record_prompt_pages(context, request, run.planned.requests)
        given = encode([*before, *items.complete(body.input, header.id)]) if stored else b""
        entry = background.start(context, request, run, given) if body.background else None
    if entry is not None:
        if body.stream:
            return await stream_events(request, background.replay(entry, 0))
        return json_bytes(entry.body)
    if body.stream:
        return await stream_events(request, _events(context, run, given))
    answer = encode(await run.full())
    if stored:
        context.response_store.put(header.id, StoredResponse(answer, given))
    return json_bytes(answer)


async def retrieve(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """A stored response as it is now; with ``stream`` the events of one that runs in the background, from the one
    behind ``starting_after`` on."""
    entry = context.response_store.get(request.match_info["response_id"])
    if request.query.get("stream", "false").lower() not in ("true", "1"):
        return json_bytes(entry.body)
    if entry.events is None:
        raise InvalidRequest("Only a response with background and stream has events that can be read again.",
                             param="stream")
    after = request.query.get("starting_after", "-1")
    if after != "-1" and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise InvalidRequest(f"starting_after must be the sequence_number of an event, got {after[:80]!r}.",
                             param="starting_after")
    return await stream_events(request, background.replay(entry, int(after) + 1))


async def delete(context: ServingContext, request: web.Request) -> web.Response:
    """Forgets a stored response; one that runs is cancelled."""
    name = request.match_info["response_id"]
    entry = context.response_store.get(name)
    context.response_store.remove(name)
    await background.cancel(entry)
    return json_response(ResponseDeleted(name))


async def cancel(context: ServingContext, request: web.Request) -> web.Response:
    """Cancels a response that runs in the background; one that has ended stays as it is."""
    entry = context.response_store.get(request.match_info["response_id"])
    if not entry.in_background:
        raise InvalidRequest("Only responses with background: true can be cancelled.", param="response_id")
    await background.cancel(entry)
    return json_bytes(entry.body)


async def input_items(context: ServingContext, request: web.Request) -> web.Response:
    """A page of a stored response's input items, those of the conversation before it among them."""
    entry = context.response_store.get(request.match_info["response_id"])
    return json_response(items.page_of(entry.items, request.query))


async def conversation(context: ServingContext, request: web.Request) -> web.Response:
    """All items of a stored response, for a router that sends the next request of its conversation to any server."""
    entry = context.response_store.get(request.match_info["response_id"])
    _check_continuable(entry, "response_id")
    return json_response(Conversation(items.conversation(entry.items, entry.body)))


def _stores(context: ServingContext, body: ResponseRequest, request: web.Request) -> bool:
    """Whether the answer is stored; raises InvalidRequest for one in the background that cannot be.

    The prefill half of a pair stores nothing, and answers as without ``background``. Nor does a batch, whose file has
    its answers.
    """
    if not context.role.of_request.answers_clients:
        body.background = None
        return False
    enabled = context.response_store.enabled
    in_batch = not isinstance(request, web.Request)
    if body.background:
        if in_batch or not enabled or body.store is False:
            reason = ("a batch runs in the background by itself" if in_batch else "set store to true" if enabled else
                      "start the server with --response-store-entries")
            raise InvalidRequest(f"background needs an answer that is stored; {reason}.", param="background",
                                 code="unsupported_parameter")
        return True
    return enabled and not in_batch and body.store is not False


def _conversation_before(context: ServingContext, body: ResponseRequest) -> list[InputItem]:
    """The conversation that ``previous_response_id`` names; raises NotFound, and Conflict while it runs."""
    if body.previous_items is not None:
        return body.previous_items
    name = body.previous_response_id
    if not name:
        return []
    entry = context.response_store.get(name, "previous_response_id")
    _check_continuable(entry, "previous_response_id")
    return items.read_items(encode(items.conversation(entry.items, entry.body)))


def _check_continuable(entry: StoredResponse, param: str) -> None:
    """Raises Conflict for a response that still runs, or that has no whole answer."""
    if entry.running:
        raise Conflict("The response still runs; continue it once it has ended, or cancel it.", param=param,
                       code="response_not_ended")
    if (status := items.status_of(entry.body)) in _BROKEN:
        raise Conflict(f"The response is {status}: it has no answer that a conversation could continue.", param=param,
                       code="response_not_completed")


async def _events(context: ServingContext, run: ResponseRun, given: bytes) -> AsyncGenerator[bytes, None]:
    """The stream of an answer, which is stored before its last event is sent."""
    async with aclosing(run.events()) as events:
        async for ready in events:
            if given and run.formatter.final is not None:
                context.response_store.put(run.header.id, StoredResponse(encode(run.formatter.final), given))
            yield b"".join(ready)
