"""A chat's answer as a response object, in full or as the events of its output items."""

from __future__ import annotations

import time
from hashlib import blake2b

from msgspec import UNSET

from ...api.errors import ServingError
from ..chat.blocks import AnswerBlocks, BlockDelta, BlockEvent, BlockStart, BlockStop, ContentBlock
from ..chat.schema import ChatChoice, ChatChunk, ChatCompletion, ChatDelta
from ..protocol.continuation import ResponseHeader
from ..protocol.usage import FinishReason, Usage
from ..sse import client_error
from .schema import (
    Events,
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
)

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ResponseObjectFormatter:
    """Formats a chat's answer as a response object, or as the events of its output items."""

    def __init__(self, body: ResponseRequest, header: ResponseHeader, num_prompt_tokens: int):
        begun = body.continuation
        self._body = body
        self._id, self._created, self._model = header
        self._blocks = AnswerBlocks()
        self._closed: set[ContentBlock] = set()
        last_number = begun.sequence_number if begun is not None else None
        self._events = Events(0 if last_number is None else last_number + 1)
        self._reason: FinishReason | None = None
        self._usage: Usage | None = None

    def full(self, choice: ChatChoice, completion: ChatCompletion) -> ResponseObject:
        self._blocks = AnswerBlocks.of(choice.message, choice.logprobs.content if choice.logprobs else [])
        self._closed = set(self._blocks.blocks)
        self._reason, self._usage = choice.finish_reason, completion.usage
        return self._object(self._end_status)

    # ------------------------------------------------------------------ events

    def start(self) -> list[bytes]:
        response = self._object("in_progress")
        return [self._events.make("response.created", response=response),
                self._events.make("response.in_progress", response=response)]

    def resume(self, continued: list[ChatDelta]) -> None:
        for delta in continued:
            for change in self._blocks.add(delta, []):
                if isinstance(change, BlockStop):
                    self._closed.add(change.block)

    def delta(self, chunk: ChatChunk) -> list[bytes]:
        self._usage = chunk.usage or self._usage
        events: list[bytes] = []
        for choice in chunk.choices:
            self._reason = choice.finish_reason or self._reason
            logprobs = choice.logprobs.content if choice.logprobs else []
            for change in self._blocks.add(choice.delta, logprobs):
                events += self._changed(change)
        return events

    def finish(self) -> list[bytes]:
        events = [event for change in self._blocks.end() for event in self._changed(change)]
        status = self._end_status
        return [*events, self._events.make(f"response.{status}", response=self._object(status))]

    def fail(self, error: Exception) -> bytes:
        return self._events.make("response.failed", response=self._object("failed", client_error(error)))

    def _changed(self, change: BlockEvent) -> list[bytes]:
        block = change.block
        at = {"output_index": block.index, "item_id": self._item_id(block)}
        if block.kind == "call":
            return self._call_changed(change, at)
        is_text = block.kind == "text"
        kind = "response.output_text" if is_text else "response.reasoning_text"
        at["content_index"] = 0
        make = self._events.make
        match change:
            case BlockStart():
                part = OutputText("") if is_text else ReasoningText("")
                return [make("response.output_item.added", output_index=block.index, item=self._added_item(block)),
                        make("response.content_part.added", part=part, **at)]
            case BlockDelta(_, text, logprobs):
                return [make(f"{kind}.delta", delta=text, **at, **({"logprobs": logprobs} if is_text else {}))]
            case BlockStop():
                self._closed.add(block)
                return [make(f"{kind}.done", text=block.text, **at,
                             **({"logprobs": block.logprobs} if is_text else {})),
                        make("response.content_part.done", part=_part(block), **at),
                        make("response.output_item.done", output_index=block.index, item=self._item(block))]

    def _call_changed(self, change: BlockEvent, at: dict[str, object]) -> list[bytes]:
        block, make = change.block, self._events.make
        match change:
            case BlockStart():
                return [make("response.output_item.added", output_index=block.index, item=self._added_item(block))]
            case BlockDelta(_, text, _):
                return [make("response.function_call_arguments.delta", delta=text, **at)]
            case BlockStop():
                self._closed.add(block)
                return [make("response.function_call_arguments.done", name=block.name, arguments=block.text, **at),
                        make("response.output_item.done", output_index=block.index, item=self._item(block))]

    # ------------------------------------------------------------------ objects

    @property
    def _end_status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def _object(self, status: str, error: ServingError | None = None) -> ResponseObject:
        body = self._body
        answer = ResponseObject(
            id=self._id, created_at=self._created, status=status, model=self._model,
            output=[self._item(block) for block in self._blocks.blocks], tools=body.tools or [],
            tool_choice=body.tool_choice or "auto", parallel_tool_calls=body.parallel_tool_calls is not False,
            instructions=body.instructions, temperature=body.temperature, top_p=body.top_p,
            top_logprobs=body.top_logprobs, max_output_tokens=body.max_output_tokens, reasoning=body.reasoning,
            metadata=body.metadata, user=body.user, usage=_usage(self._usage))
        if body.text is not None and body.text.format is not None:
            answer.text = body.text
        if status == "incomplete":
            answer.incomplete_details = IncompleteDetails("max_output_tokens")
        if status == "completed":
            answer.completed_at = int(time.time())
        if error is not None:
            code = "rate_limit_exceeded" if error.status == 429 else "server_error"
            answer.error = ResponseError(code, error.message)
        return answer

    def _item_id(self, block: ContentBlock) -> str:
        """The same on every server that sends a part of this answer."""
        name = f"{self._id}/{block.index}"
        return f"{_PREFIXES[block.kind]}_{blake2b(name.encode(), digest_size=16).hexdigest()}"

    def _added_item(self, block: ContentBlock) -> OutputItem:
        item_id = self._item_id(block)
        if block.kind == "call":
            return OutputCall(item_id, block.call_id, block.name, "", "in_progress")
        return (OutputMessage if block.kind == "text" else OutputReasoning)(item_id, [], "in_progress")

    def _item(self, block: ContentBlock) -> OutputItem:
        closed = block in self._closed
        cut = self._reason == "length" and block is self._blocks.blocks[-1]
        status = "incomplete" if closed and cut else "completed" if closed else "in_progress"
        item_id = self._item_id(block)
        if block.kind == "call":
            return OutputCall(item_id, block.call_id, block.name, block.text, status)
        if block.kind == "reasoning":
            return OutputReasoning(item_id, [ReasoningText(block.text)] if block.deltas else [], status)
        parts = [OutputText(block.text, block.logprobs)] if closed or block.deltas else []
        return OutputMessage(item_id, parts, status)


def _part(block: ContentBlock) -> OutputText | ReasoningText:
    return OutputText(block.text, block.logprobs) if block.kind == "text" else ReasoningText(block.text)


def _usage(usage: Usage | None) -> ResponseUsage | None:
    if usage is None:
        return None
    details = usage.completion_tokens_details
    reasoning = details.reasoning_tokens or 0 if details else 0
    cached = InputTokensDetails(usage.cached_tokens) if usage.prompt_tokens_details else UNSET
    return ResponseUsage(usage.prompt_tokens, usage.completion_tokens, OutputTokensDetails(reasoning),
                         usage.total_tokens, usage.prompt_tokens, usage.completion_tokens, cached)
