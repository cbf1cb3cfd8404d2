"""``/v1/chat/completions``"""

from __future__ import annotations

from aiohttp import web

from ..context.serving_context import ServingContext
from ..protocol.sampling import decode_chat
from ..respond import respond
from .run import plan_chat


async def chat_completions(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """OpenAI's chat completions."""
    return await respond(context, request, decode_chat, plan_chat)
