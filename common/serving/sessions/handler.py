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
    return json_response(await open_session_body(context, await request.read()))


async def open_session_body(context: ServingContext, data: bytes) -> str:
    """The id of a session that a JSON body asks for; raises ServingError."""
    context.status.check_serving()
    body = _open.decode(data)
    return context.sessions.open(body.capacity_of_str_len, body.session_id or None)


async def close_session(context: ServingContext, request: web.Request) -> web.Response:
    """Closes a session; 404 for one that is not open."""
    return json_response(await close_session_body(context, await request.read()))


async def close_session_body(context: ServingContext, data: bytes) -> dict[str, bool]:
    """Closes the session of a JSON body; raises ServingError."""
    context.sessions.close(_close.decode(data).session_id)
    return {"success": True}
