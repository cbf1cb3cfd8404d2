"""``/v1/chat/completions``"""

from __future__ import annotations

from aiohttp import web

from ..openai.protocol import decode_chat
from .chat_run import plan_chat
from .front import Front
from .run import respond


async def chat_completions(context: Front, request: web.Request) -> web.StreamResponse:
    """OpenAI's chat completions."""
    return await respond(context, request, decode_chat, plan_chat)
