"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio

from aiohttp import web
from msgspec import UNSET

from ...api.token_ids import check_ids
from ..chat.prompt import chat_prompt
from ..chat.tool_choice import tool_choice
from ..context.serving_context import ServingContext
from ..web import json_response
from .schema import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    decode_detokenize,
    decode_tokenize,
)

_MAX_INLINE_TOKENS = 10_000  # more are decoded off the event loop


async def tokenize(context: ServingContext, request: web.Request) -> web.Response:
    return json_response(await tokenize_body(context, decode_tokenize(await request.read())))


async def tokenize_body(context: ServingContext, body: TokenizeRequest) -> TokenizeAnswer:
    """The token ids of a text, of several, or of a chat as its template renders it; raises ServingError."""
    tokenizer = context.status.serving_tokenizer()
    context.model.check_name(body.model)
    token_ids = await tokenizer.encode_many(_texts(context, body), limit=context.model.spec.context_length,
                                            add_special_tokens=body.adds_special_tokens)
    strs = [tokenizer.token_strs(ids) for ids in token_ids] if body.return_token_strs else UNSET
    counts = [len(ids) for ids in token_ids]
    if isinstance(body.prompt, list):
        return TokenizeAnswer(token_ids, counts, context.planner.token_limit, strs)
    return TokenizeAnswer(token_ids[0], counts[0], context.planner.token_limit, strs and strs[0])


def _texts(context: ServingContext, body: TokenizeRequest) -> list[str]:
    if body.prompt is not None:
        return body.prompt if isinstance(body.prompt, list) else [body.prompt]
    chat = body.chat()
    return [chat_prompt(context.status.serving_tokenizer(), chat, tool_choice(chat),
                        context.config.answers)]


async def detokenize(context: ServingContext, request: web.Request) -> web.Response:
    return json_response(await detokenize_body(context, decode_detokenize(await request.read())))


async def detokenize_body(context: ServingContext, body: DetokenizeRequest) -> DetokenizeAnswer:
    """The text of token ids, or the texts of several lists; raises ServingError."""
    tokenizer = context.status.serving_tokenizer()
    context.model.check_name(body.model)
    lists: list[list[int]] = [ids for ids in body.tokens if isinstance(ids, list)]
    batched = bool(lists)
    if not batched:
        lists = [[token for token in body.tokens if isinstance(token, int)]]
    for ids in lists:
        check_ids(ids, context.model.spec.vocab_size, "tokens")

    def decode_all() -> tuple[list[str], list[str]]:
        given = body.skip_special_tokens
        return ([tokenizer.decode(ids, skip_special_tokens=given is not False) for ids in lists],
                [tokenizer.decode(ids, skip_special_tokens=bool(given)) for ids in lists])

    texts, prompts = decode_all() if sum(map(len, lists)) < _MAX_INLINE_TOKENS else await asyncio.to_thread(decode_all)
    return DetokenizeAnswer(texts, prompts) if batched else DetokenizeAnswer(texts[0], prompts[0])
