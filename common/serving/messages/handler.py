"""``/v1/messages`` and ``/v1/messages/count_tokens``: a chat told as Anthropic's messages"""

from __future__ import annotations

import time
import uuid

import msgspec
from aiohttp import web

from ...api.unreadable import UNREADABLE
from ..chat.blocks import Block, Blocks, Change, Closed, Grown, Opened
from ..chat.prompt import chat_prompt
from ..chat.run import ChatRun, plan_chat
from ..context import ServingContext
from ..lifecycle.prompt_pages import note_pages
from ..protocol.continuation import HEADER
from ..protocol.prompts import Prompts
from ..protocol.requests import check_chat
from ..protocol.responses import ChatChoice, ChatChunk, ChatChunkChoice, ChatDelta, Usage, encode
from ..sse import shown, stream_events
from ..stream_adapter import retold, retold_whole
from ..web import json_bytes, json_response
from .answer import (
    AnswerBlock,
    AnswerMessage,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
    error_body,
    event,
)
from .request import MessagesRequest, as_chat, decode_count, decode_messages

PATH = "/v1/messages"


async def messages(front: ServingContext, request: web.Request) -> web.StreamResponse:
    """A chat in Anthropic's form."""
    arrived = time.monotonic()
    with front.counting_refusals():
        front.serving_tokenizer()  # a server that is starting reads no bodies
        body = decode_messages(await request.read())
        begun, with_ids = body.continuation, HEADER in request.headers
        name = (begun and begun.id) or f"msg_{uuid.uuid4().hex}"
        run = await plan_chat(front, check_chat(as_chat(body)), arrived=arrived, with_ids=with_ids, name=name)
        note_pages(front, request, run.requests)
    answer = _Answer(front, body, name, len(run.requests[0].input_ids))
    if body.stream:
        return await stream_events(request, retold(run, answer, resumed=begun is not None, with_ids=with_ids))
    return json_bytes(encode(await answer.whole(run)))


async def count_tokens(front: ServingContext, request: web.Request) -> web.Response:
    """How many tokens the prompt of such a chat has."""
    tokenizer = front.serving_tokenizer()
    chat = as_chat(decode_count(await request.read()))
    front.check_model(chat.model)
    prompt = chat_prompt(tokenizer, chat)
    ids = await front.prompt_ids(Prompts(texts=[prompt]), "messages", add_special_tokens=False)
    return json_response(TokenCount(len(ids[0])))


class _Answer:
    def __init__(self, front: ServingContext, body: MessagesRequest, name: str, num_prompt_tokens: int):
        self._blocks = Blocks()
        self._message = AnswerMessage(name, body.model or front.config.model_name, [],
                                      MessageUsage(num_prompt_tokens, 0))

    async def whole(self, run: ChatRun) -> AnswerMessage:
        choice, answer = await retold_whole(run)
        self._message.content = [_block(block, block.text) for block in Blocks.of(choice.message, []).blocks]
        self._stop(choice)
        self._count(answer.usage)
        return self._message

    def begin(self) -> list[bytes]:
        return [event("message_start", message=self._message), event("ping")]

    def resume(self, told: list[ChatDelta]) -> None:
        for delta in told:
            self._blocks.take(delta, [])

    def fail(self, error: Exception) -> bytes:
        return event("error", error=error_body(shown(error)).error)

    def say(self, chunk: ChatChunk) -> list[bytes]:
        self._count(chunk.usage)
        said: list[bytes] = []
        for choice in chunk.choices:
            self._stop(choice)
            said += [_tell(change) for change in self._blocks.take(choice.delta, [])]
        return said

    def end(self) -> list[bytes]:
        message = self._message
        return [*[_tell(change) for change in self._blocks.end()],
                event("message_delta", usage=message.usage,
                      delta={"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}),
                event("message_stop")]

    def _stop(self, choice: ChatChoice | ChatChunkChoice) -> None:
        if choice.finish_reason is None:
            return
        reasons: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}
        self._message.stop_reason = reasons.get(choice.finish_reason, "end_turn")
        if choice.finish_reason == "stop" and isinstance(choice.matched_stop, str):
            self._message.stop_reason, self._message.stop_sequence = "stop_sequence", choice.matched_stop

    def _count(self, usage: Usage | None) -> None:
        if usage is not None:
            cached = usage.cached_tokens
            self._message.usage = MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _tell(change: Change) -> bytes:
    block = change.block
    match change:
        case Opened():
            return event("content_block_start", index=block.index, content_block=_block(block, ""))
        case Grown(_, piece, _):
            delta = {"text": {"type": "text_delta", "text": piece},
                     "reasoning": {"type": "thinking_delta", "thinking": piece},
                     "call": {"type": "input_json_delta", "partial_json": piece}}[block.kind]
            return event("content_block_delta", index=block.index, delta=delta)
        case Closed():
            return event("content_block_stop", index=block.index)


def _block(block: Block, text: str) -> AnswerBlock:
    if block.kind == "text":
        return TextBlock(text)
    if block.kind == "reasoning":
        return ThinkingBlock(text)
    return ToolUseBlock(block.call_id, block.name, _input(text))


def _input(arguments: str) -> msgspec.Raw | dict[str, object]:
    """The call's arguments as they are; a model that wrote no JSON object is told as having given none."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return {}
    return msgspec.Raw(arguments.encode())
