"""``/v1/messages`` and ``/v1/messages/count_tokens``: a chat as Anthropic's messages."""

from __future__ import annotations

from aiohttp import web

from ..chat.prompt import chat_prompt
from ..chat.stream_adapter import ChatApi, respond_adapted
from ..chat.tool_choice import tool_choice
from ..context.serving_context import ServingContext
from ..protocol.prompts import Prompts
from ..web import json_response
from .formatter import MessageFormatter
from .schema import (
    TokenCount,
    decode_count,
    decode_messages,
)
from .to_chat import as_chat

PATH = "/v1/messages"


async def messages(context: ServingContext, request: web.Request) -> web.StreamResponse:
    """A chat in Anthropic's form."""
    return await respond_adapted(context, request, _API)


async def count_tokens(context: ServingContext, request: web.Request) -> web.Response:
    """The number of tokens in the prompt of such a chat."""
    tokenizer = context.status.serving_tokenizer()
    chat = as_chat(decode_count(await request.read()))
    context.model.check_name(chat.model)
    prompt = chat_prompt(tokenizer, chat, tool_choice(chat), context.config.answers)
    ids = await context.planner.prompt_ids(Prompts(texts=[prompt]), "messages", add_special_tokens=False)
    return json_response(TokenCount(len(ids[0])))


_API = ChatApi(decode_messages, as_chat, MessageFormatter, "msg_")
