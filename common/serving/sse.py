"""Server-sent events whose HTTP status depends on the first of them."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from aiohttp import web

from ..api.errors import ServingError
from .protocol.encoding import event
from .web import log_failure

log = logging.getLogger("baton.server")

_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


async def stream_events(request: web.Request, events: AsyncGenerator[bytes, None]) -> web.StreamResponse:
    """Sends ``events``, complete ones, those that are ready together in one write.

    The headers are sent with the first event: an error before it is raised, so that the HTTP status tells a router what
    to do; a later one becomes an error event, which ends the stream.
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
            shown = client_error(error)
            log_failure(shown, request)
            await response.write(event(shown.to_openai()))
    assert response is not None, "a stream has at least one event"
    await response.write_eof()
    return response


def client_error(error: Exception) -> ServingError:
    """The error that the client is sent; the details of a bug stay in the log."""
    if isinstance(error, ServingError):
        return error
    log.error("a stream failed", exc_info=error)
    return ServingError("The server failed to handle the request; its log says why.")
