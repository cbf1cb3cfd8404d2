"""Server-sent events whose HTTP status is chosen by the first of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from ..api.errors import ServingError
from .protocol.responses import event
from .web import note_failure

log = logging.getLogger("baton.front")

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def stream_events(request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Send ``events`` (complete ones, several a chunk where they are ready together).

    The headers go out with the first of them: an error before that is raised, for a proper status that a router can act
    on; a later one becomes an error event, after which the stream ends.
    """
    response: web.StreamResponse | None = None
    async with aclosing(events):
        try:
            async for chunk in events:
                if response is None:
                    response = web.StreamResponse(headers=_HEADERS)
                    await response.prepare(request)
                await response.write(chunk)
        except ConnectionError:
            raise
        except Exception as error:
            if response is None:
                raise
            told = shown(error)
            note_failure(told, request)
            await response.write(event(told.to_openai()))
    assert response is not None, "a stream has at least one event"
    await response.write_eof()
    return response


def shown(error: Exception) -> ServingError:
    """What the client is told: a bug's details stay in the log."""
    if isinstance(error, ServingError):
        return error
    log.error("a stream failed", exc_info=error)
    return ServingError("The server failed to handle the request; its log says why.")
