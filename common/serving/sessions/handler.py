"""``/open_session`` and ``/close_session``"""

from __future__ import annotations

import msgspec
from aiohttp import web

from ...api.wire import Int64
from ..context import ServingContext
from ..protocol.decoding import BodyDecoder
from ..web import json_response


class _Open(msgspec.Struct):
    capacity_of_str_len: Int64
    session_id: str | None = None


class _Close(msgspec.Struct):
    session_id: str


_open, _close = BodyDecoder(_Open), BodyDecoder(_Close)


async def open_session(front: ServingContext, request: web.Request) -> web.Response:
    """Answers with the session's id, a JSON string."""
    front.serving_tokenizer()
    body = _open.decode(await request.read())
    return json_response(front.sessions.open(body.capacity_of_str_len, body.session_id or None))


async def close_session(front: ServingContext, request: web.Request) -> web.Response:
    """404 for a session that is not open."""
    front.sessions.close(_close.decode(await request.read()).session_id)
    return json_response({"success": True})
