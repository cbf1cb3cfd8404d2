"""``/v1/responses``: a chat as items."""

from __future__ import annotations

from aiohttp import web

from ...api.errors import NotFound
from ..chat.stream_adapter import ChatApi, respond_adapted
from ..context.serving_context import ServingContext
from .formatter import ResponseObjectFormatter
from .schema import (
    decode_response,
)
from .to_chat import as_chat, translate_error


async def responses(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """A chat as items."""
    return await respond_adapted(context, request, _API)


async def stored(context: ServingContext, request: web.Request) -> web.Response:
    """404: no response is stored."""
    raise NotFound("This server stores no responses.", param="response_id", code="response_not_found")


_API = ChatApi(decode_response, as_chat, ResponseObjectFormatter, "resp_", translate_error)
