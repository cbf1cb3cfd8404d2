"""Responses that run in the background: their clients may leave, poll, read the stream again, and cancel."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from ..context.in_flight import shut_down
from ..context.response_store import StoredResponse
from ..context.serving_context import ServingContext
from ..protocol.encoding import encode
from ..sse import client_error
from ..web import log_failure
from .run import ResponseRun

log = logging.getLogger("baton.server")


def start(context: ServingContext, request: web.Request, run: ResponseRun, items: bytes) -> StoredResponse:
    """Stores a planned response as queued and runs it; raises Overloaded where there is no room for it.

    It counts as one of the server's requests until it ends: a server that stops lets it end, or ends it as failed.
    """
    store = context.response_store
    store.check_room()
    events = run.formatter.queue()
    entry = StoredResponse(encode(run.formatter.object("queued")), items, in_background=True,
                           streams=bool(run.body.stream))
    entry.add_events(events)
    entry.task = asyncio.create_task(_run(context, run, entry), name=run.header.id)
    context.in_flight.begin(entry.task, request)
    store.put(run.header.id, entry)
    return entry


async def cancel(entry: StoredResponse) -> None:
    """Ends a response that runs, and waits until it has ended."""
    if entry.task is not None:
        entry.cancelled = True
        entry.task.cancel()
    while entry.running:
        await entry.changed.wait()


async def replay(entry: StoredResponse, first: int) -> AsyncGenerator[bytes, None]:
    """The events of a response's stream from number ``first`` on, until its last one."""
    assert entry.events is not None
    yield b": the events from here on\n\n"
    while True:
        changed, running = entry.changed, entry.running
        ready = entry.events[first:]
        if ready:
            first += len(ready)
            yield b"".join(ready)
        if not running:
            return
        await changed.wait()


async def _run(context: ServingContext, run: ResponseRun, entry: StoredResponse) -> None:
    formatter, name, begun = run.formatter, run.header.id, False
    try:
        async with aclosing(run.events()) as events:
            async for ready in events:
                if not begun:
                    begun, entry.body = True, encode(formatter.object("in_progress"))
                entry.add_events(ready)
    except asyncio.CancelledError:
        entry.add_events([formatter.cancel() if entry.cancelled else formatter.fail(shut_down())])
    except Exception as error:
        shown = client_error(error)
        log_failure(shown, rid=run.planned.requests[0].rid)
        entry.add_events([formatter.fail(shown)])
    finally:
        task, entry.task = entry.task, None
        entry.body = encode(formatter.final)
        if task is not None:
            context.in_flight.end(task)
        context.response_store.update(name, entry)
        entry.notify()
