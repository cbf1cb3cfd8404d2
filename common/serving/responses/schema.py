"""``/v1/responses``: its answer, and the events of its stream."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ..protocol.responses import TokenLogprob, encode
from .to_chat import FunctionTool, ReasoningOptions, TextFormat, TextOptions


class OutputText(msgspec.Struct):
    text: str
    logprobs: list[TokenLogprob] = []
    annotations: list[Any] = []
    type: str = "output_text"


class ReasoningText(msgspec.Struct):
    text: str
    type: str = "reasoning_text"


class OutputMessage(msgspec.Struct):
    id: str
    content: list[OutputText]
    status: str
    role: str = "assistant"
    type: str = "message"


class OutputReasoning(msgspec.Struct):
    id: str
    content: list[ReasoningText]
    status: str
    summary: list[Any] = []
    type: str = "reasoning"


class OutputCall(msgspec.Struct):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str
    type: str = "function_call"


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """``prompt_tokens`` and ``completion_tokens`` are SGLang's names of the same counts."""

    input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    prompt_tokens: int
    completion_tokens: int
    input_tokens_details: InputTokensDetails | UnsetType = UNSET


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """``output`` holds OutputItems; ``status`` is in_progress, completed, incomplete or failed."""

    id: str
    created_at: int
    status: str
    model: str
    output: list[Any]
    tools: list[FunctionTool]
    tool_choice: Any
    parallel_tool_calls: bool
    text: TextOptions = TextOptions(TextFormat("text"))
    instructions: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    max_output_tokens: int | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    completed_at: int | None = None
    previous_response_id: None = None
    background: bool = False
    store: bool = False
    truncation: str = "disabled"
    service_tier: str = "default"
    object: str = "response"


class Events:
    """Events of one stream, numbered as they are made, from ``first`` on."""

    def __init__(self, first: int) -> None:
        self._sequence_number = first

    def make(self, kind: str, **fields: Any) -> bytes:
        """One server-sent event, named by ``type`` twice, as OpenAI does."""
        body = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"
