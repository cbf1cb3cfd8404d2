"""A chat's answer as Anthropic's message, in full or as the events of its content blocks."""

from __future__ import annotations

import msgspec

from ...api.unreadable import UNREADABLE
from ..chat.blocks import AnswerBlocks, BlockDelta, BlockEvent, BlockStart, BlockStop, ContentBlock
from ..chat.schema import ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatDelta
from ..protocol.continuation import ResponseHeader
from ..protocol.usage import Usage
from ..sse import client_error
from .schema import (
    AnswerBlock,
    AnswerMessage,
    MessagesRequest,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    error_body,
    event,
)


class MessageFormatter:
    """Formats a chat's answer as a message, or as the events of its content blocks."""

    def __init__(self, body: MessagesRequest, header: ResponseHeader, num_prompt_tokens: int):
        self._blocks = AnswerBlocks()
        self._omits_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._message = AnswerMessage(header.id, header.model, [], MessageUsage(num_prompt_tokens, 0))

    def full(self, choice: ChatChoice, completion: ChatCompletion) -> AnswerMessage:
        self._message.content = [_block(block, "" if self._omits(block) else block.text)
                                 for block in AnswerBlocks.of(choice.message, []).blocks]
        self._set_stop_reason(choice)
        self._set_usage(completion.usage)
        return self._message

    def start(self) -> list[bytes]:
        return [event("message_start", message=self._message), event("ping")]

    def resume(self, continued: list[ChatDelta]) -> None:
        for delta in continued:
            self._blocks.add(delta, [])

    def delta(self, chunk: ChatChunk) -> list[bytes]:
        self._set_usage(chunk.usage)
        events: list[bytes] = []
        for choice in chunk.choices:
            self._set_stop_reason(choice)
            events += [_event(change) for change in self._blocks.add(choice.delta, [])
                       if not (isinstance(change, BlockDelta) and self._omits(change.block))]
        return events

    def finish(self) -> list[bytes]:
        message = self._message
        return [*[_event(change) for change in self._blocks.end()],
                event("message_delta", usage=message.usage,
                      delta={"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}),
                event("message_stop")]

    def fail(self, error: Exception) -> bytes:
        return event("error", error=error_body(client_error(error)).error)

    def _omits(self, block: ContentBlock) -> bool:
        return self._omits_thinking and block.kind == "reasoning"

    def _set_stop_reason(self, choice: ChatChoice | ChatChunkChoice) -> None:
        if choice.finish_reason is None:
            return
        reasons: dict[str, StopReason] = {"length": "max_tokens", "tool_calls": "tool_use"}
        self._message.stop_reason = reasons.get(choice.finish_reason, "end_turn")
        if choice.finish_reason == "stop" and isinstance(choice.matched_stop, str):
            self._message.stop_reason, self._message.stop_sequence = "stop_sequence", choice.matched_stop

    def _set_usage(self, usage: Usage | None) -> None:
        if usage is not None:
            cached = usage.cached_tokens
            self._message.usage = MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _event(change: BlockEvent) -> bytes:
    block = change.block
    match change:
        case BlockStart():
            return event("content_block_start", index=block.index, content_block=_block(block, ""))
        case BlockDelta(_, text, _):
            delta = {"text": {"type": "text_delta", "text": text},
                     "reasoning": {"type": "thinking_delta", "thinking": text},
                     "call": {"type": "input_json_delta", "partial_json": text}}[block.kind]
            return event("content_block_delta", index=block.index, delta=delta)
        case BlockStop():
            return event("content_block_stop", index=block.index)


def _block(block: ContentBlock, text: str) -> AnswerBlock:
    if block.kind == "text":
        return TextBlock(text)
    if block.kind == "reasoning":
        return ThinkingBlock(text)
    return ToolUseBlock(block.call_id, block.name, _input(text))


def _input(arguments: str) -> msgspec.Raw | dict[str, object]:
    """The call's arguments as they are; empty where the model wrote no JSON object."""
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return {}
    return msgspec.Raw(arguments.encode())
