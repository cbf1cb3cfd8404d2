"""Answers of a chat, one for each round of tools, as a response object, in full or as the events of its items."""

from __future__ import annotations

import time
from hashlib import blake2b
from typing import Any, NamedTuple

from msgspec import UNSET

from ...api.errors import ServingError
from ..chat.blocks import AnswerBlocks, BlockDelta, BlockEvent, BlockStart, BlockStop, ContentBlock
from ..chat.schema import ChatChoice, ChatChunk, ChatCompletion, ChatDelta
from ..protocol.continuation import ResponseHeader
from ..protocol.usage import FinishReason, Usage
from ..sse import client_error
from ..tool_servers.base import ServerTool, ToolResult
from .request_tools import RequestTools
from .schema import (
    Events,
    IncompleteDetails,
    InputTokensDetails,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputServerCall,
    OutputText,
    OutputTokensDetails,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponseRequest,
    ResponseUsage,
)

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ServerCall(NamedTuple):
    """A call that the model wrote and the server is to run."""

    block: ContentBlock
    tool: ServerTool


class ResponseObjectFormatter:
    """Formats a chat's answers as a response object, or as the events of its output items."""

    def __init__(self, body: ResponseRequest, header: ResponseHeader, tools: RequestTools, *, stored: bool = False):
        begun = body.continuation
        self._body = body
        self._id, self._created, self._model = header
        self._tools = tools.functions
        self._stored = stored
        self._queued = False
        self._before: list[OutputItem] = []  # of earlier rounds
        self._blocks = AnswerBlocks()
        self._closed: set[ContentBlock] = set()
        self._results: dict[ContentBlock, ToolResult] = {}
        last_number = begun.sequence_number if begun is not None else None
        self._events = Events(0 if last_number is None else last_number + 1)
        self._reason: FinishReason | None = None
        self._usage: Usage | None = None
        self._usage_before: ResponseUsage | None = None
        self.final: ResponseObject | None = None
        """The response as the last event has it, once there is one."""

    # ------------------------------------------------------------------ rounds

    def add_answer(self, choice: ChatChoice, completion: ChatCompletion) -> None:
        """Takes a round's complete answer."""
        self._blocks = AnswerBlocks.of(choice.message, choice.logprobs.content if choice.logprobs else [])
        self._closed = set(self._blocks.blocks)
        self._reason, self._usage = choice.finish_reason, completion.usage

    def server_calls(self) -> list[ServerCall]:
        """The calls of the round that the server is to run; none of an answer that was cut."""
        if self._reason == "length":
            return []
        return [ServerCall(block, self._tools[block.name]) for block in self._blocks.blocks
                if block.kind == "call" and block.name in self._tools]

    @property
    def calls_client(self) -> bool:
        """True where the round calls functions of the client's."""
        return any(block.kind == "call" and block.name not in self._tools for block in self._blocks.blocks)

    def add_result(self, call: ServerCall, result: ToolResult) -> list[bytes]:
        """Takes what a call of the server's brought; returns its events."""
        block = call.block
        self._results[block] = result
        make, at = self._events.make, {"output_index": self._index(block), "item_id": self._item_id(block)}
        end = "failed" if result.is_error else "completed"
        return [make(f"response.mcp_call.{end}", **at),
                make("response.output_item.done", output_index=self._index(block), item=self._item(block))]

    def next_round(self) -> None:
        """Begins the next answer."""
        self._usage_before = self._all_usage
        self._before = self.output
        self._blocks, self._closed, self._reason, self._usage = AnswerBlocks(), set(), None, None

    @property
    def output(self) -> list[OutputItem]:
        """The items of all rounds so far."""
        return [*self._before, *(self._item(block) for block in self._blocks.blocks)]

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the model wrote, in all rounds."""
        usage = self._all_usage
        return 0 if usage is None else usage.output_tokens

    # ------------------------------------------------------------------ events

    def queue(self) -> list[bytes]:
        """The events of a response that waits in the background."""
        self._queued = True
        response = self.object("queued")
        return [self._events.make("response.created", response=response),
                self._events.make("response.queued", response=response)]

    def start(self) -> list[bytes]:
        response = self.object("in_progress")
        created = [] if self._queued else [self._events.make("response.created", response=response)]
        return [*created, self._events.make("response.in_progress", response=response)]

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

    def end_round(self) -> list[bytes]:
        return [event for change in self._blocks.end() for event in self._changed(change)]

    def finish(self) -> list[bytes]:
        """The last event of all, once the last round has ended."""
        return [self._end(self.end_status)]

    def fail(self, error: Exception) -> bytes:
        return self._end("failed", client_error(error))

    def cancel(self) -> bytes:
        return self._end("cancelled")

    def _end(self, status: str, error: ServingError | None = None) -> bytes:
        self.final = self.object(status, error)
        return self._events.make(f"response.{status}", response=self.final)

    def _changed(self, change: BlockEvent) -> list[bytes]:
        block = change.block
        at: dict[str, Any] = {"output_index": self._index(block), "item_id": self._item_id(block)}
        if block.kind == "call":
            return self._call_changed(change, at)
        is_text = block.kind == "text"
        kind = "response.output_text" if is_text else "response.reasoning_text"
        at["content_index"] = 0
        make = self._events.make
        match change:
            case BlockStart():
                part = OutputText("") if is_text else ReasoningText("")
                return [self._added(block), make("response.content_part.added", part=part, **at)]
            case BlockDelta(_, text, logprobs):
                return [make(f"{kind}.delta", delta=text, **at, **({"logprobs": logprobs} if is_text else {}))]
            case BlockStop():
                self._closed.add(block)
                return [make(f"{kind}.done", text=block.text, **at,
                             **({"logprobs": block.logprobs} if is_text else {})),
                        make("response.content_part.done", part=_part(block), **at), self._done(block)]

    def _call_changed(self, change: BlockEvent, at: dict[str, Any]) -> list[bytes]:
        block, make = change.block, self._events.make
        of_server = block.name in self._tools
        kind = "response.mcp_call_arguments" if of_server else "response.function_call_arguments"
        match change:
            case BlockStart():
                return [self._added(block), *([make("response.mcp_call.in_progress", **at)] if of_server else ())]
            case BlockDelta(_, text, _):
                return [make(f"{kind}.delta", delta=text, **at)]
            case BlockStop():
                self._closed.add(block)
                if of_server:
                    return [make(f"{kind}.done", arguments=block.text, **at),
                            *([self._done(block)] if self._reason == "length" else ())]
                return [make(f"{kind}.done", name=block.name, arguments=block.text, **at), self._done(block)]

    def _added(self, block: ContentBlock) -> bytes:
        return self._events.make("response.output_item.added", output_index=self._index(block),
                                 item=self._added_item(block))

    def _done(self, block: ContentBlock) -> bytes:
        return self._events.make("response.output_item.done", output_index=self._index(block), item=self._item(block))

    # ------------------------------------------------------------------ objects

    @property
    def end_status(self) -> str:
        return "incomplete" if self._reason == "length" else "completed"

    def object(self, status: str, error: ServingError | None = None) -> ResponseObject:
        """The response as it is now."""
        body = self._body
        answer = ResponseObject(
            id=self._id, created_at=self._created, status=status, model=self._model,
            output=self.output, tools=body.tools or [],
            tool_choice=body.tool_choice or "auto", parallel_tool_calls=body.parallel_tool_calls is not False,
            instructions=body.instructions, temperature=body.temperature, top_p=body.top_p,
            top_logprobs=body.top_logprobs, max_output_tokens=body.max_output_tokens, reasoning=body.reasoning,
            metadata=body.metadata, user=body.user, usage=self._all_usage, max_tool_calls=body.max_tool_calls,
            previous_response_id=body.previous_response_id, background=bool(body.background), store=self._stored)
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

    @property
    def _all_usage(self) -> ResponseUsage | None:
        return _sum(self._usage_before, _usage(self._usage))

    def _index(self, block: ContentBlock) -> int:
        return len(self._before) + block.index

    def _item_id(self, block: ContentBlock) -> str:
        """The same on every server that sends a part of this answer."""
        name = f"{self._id}/{self._index(block)}"
        prefix = "mcp" if block.kind == "call" and block.name in self._tools else _PREFIXES[block.kind]
        return f"{prefix}_{blake2b(name.encode(), digest_size=16).hexdigest()}"

    def _added_item(self, block: ContentBlock) -> OutputItem:
        item_id = self._item_id(block)
        if block.kind != "call":
            return (OutputMessage if block.kind == "text" else OutputReasoning)(item_id, [], "in_progress")
        if (tool := self._tools.get(block.name)) is not None:
            return OutputServerCall(item_id, tool.server, tool.name, "", "in_progress")
        return OutputCall(item_id, block.call_id, block.name, "", "in_progress")

    def _item(self, block: ContentBlock) -> OutputItem:
        closed = block in self._closed
        cut = self._reason == "length" and block is self._blocks.blocks[-1]
        status = "incomplete" if closed and cut else "completed" if closed else "in_progress"
        item_id = self._item_id(block)
        if block.kind == "call":
            if (tool := self._tools.get(block.name)) is not None:
                return self._server_call(block, tool, item_id, status)
            return OutputCall(item_id, block.call_id, block.name, block.text, status)
        if block.kind == "reasoning":
            return OutputReasoning(item_id, [ReasoningText(block.text)] if block.deltas else [], status)
        parts = [OutputText(block.text, block.logprobs)] if closed or block.deltas else []
        return OutputMessage(item_id, parts, status)

    def _server_call(self, block: ContentBlock, tool: ServerTool, item_id: str, status: str) -> OutputServerCall:
        result = self._results.get(block)
        if result is None:
            return OutputServerCall(item_id, tool.server, tool.name, block.text,
                                    status if status == "incomplete" else "in_progress")
        if result.is_error:
            return OutputServerCall(item_id, tool.server, tool.name, block.text, "failed", error=result.text)
        return OutputServerCall(item_id, tool.server, tool.name, block.text, "completed", result.text)


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


def _sum(a: ResponseUsage | None, b: ResponseUsage | None) -> ResponseUsage | None:
    """The usage of rounds together: each computes its own prompt."""
    if a is None or b is None:
        return a or b
    reasoning = a.output_tokens_details.reasoning_tokens + b.output_tokens_details.reasoning_tokens
    cached = [each.input_tokens_details.cached_tokens for each in (a, b) if each.input_tokens_details is not UNSET]
    inputs, outputs = a.input_tokens + b.input_tokens, a.output_tokens + b.output_tokens
    return ResponseUsage(inputs, outputs, OutputTokensDetails(reasoning), inputs + outputs, inputs, outputs,
                         InputTokensDetails(sum(cached)) if cached else UNSET)
