"""``/open_session`` and ``/close_session``."""

from __future__ import annotations

from aiohttp import web

from ..context.serving_context import ServingContext
from ..protocol.decoding import BodyDecoder
from ..web import json_response
from .schema import CloseSessionRequest, OpenSessionRequest

_open, _close = BodyDecoder(OpenSessionRequest), BodyDecoder(CloseSessionRequest)


async def open_session(context: ServingContext, request: web.Request) -> web.Response:
    """Opens a session; the answer is its id, a JSON string."""
    context.status.check_serving()
    body = _open.decode(await request.read())
    return json_response(context.sessions.open(body.capacity_of_str_len, body.session_id or None))


async def close_session(context: ServingContext, request: web.Request) -> web.Response:
    """Closes a session; 404 for one that is not open."""
    context.sessions.close(_close.decode(await request.read()).session_id)
    return json_response({"success": True})
