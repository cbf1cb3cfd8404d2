"""``/v1/responses``: its answer, and the events of its stream."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from ...api.wire import Float32, Int32, Int64
from ..protocol.bootstrap import BootstrapFields
from ..protocol.continuation import Continuation
from ..protocol.decoding import BodyDecoder
from ..protocol.encoding import encode
from ..protocol.logprobs import TokenLogprob
from ..protocol.sampling import MAX_TOP_LOGPROBS, check_range
from ..protocol.unsupported_fields import RESPONSE

BUILT_IN_TOOLS = {"web_search": "browser", "web_search_preview": "browser", "code_interpreter": "python"}
"""OpenAI's types of built-in tools, and the labels of the tool servers that run them, as SGLang names these."""
SERVER_TOOLS = frozenset((*BUILT_IN_TOOLS, "mcp"))
"""Types of tools that the server runs."""


class InputPart(msgspec.Struct, omit_defaults=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, omit_defaults=True):
    """A message, a function call or its output, a call that the server ran, or reasoning, by ``type``; without one it
    is a message."""

    id: str | None = None
    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    status: str | None = None
    server_label: str | None = None
    error: str | None = None


class FunctionTool(msgspec.Struct):
    """A function of the client's, or by another ``type`` tools that this server runs."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    server_label: str | None | UnsetType = UNSET
    allowed_tools: Any = UNSET
    require_approval: Any = UNSET
    server_url: Any = UNSET
    connector_id: Any = UNSET


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponseRequest(BootstrapFields, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Int32 | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    top_logprobs: Int32 | None = None
    include: list[str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    max_tool_calls: Int32 | None = None
    # SGLang's
    top_k: Int32 | None = None
    min_p: Float32 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int32] | None = None
    stop_regex: str | list[str] | None = None
    seed: Int64 | None = None
    frequency_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    repetition_penalty: Float32 | None = None
    logit_bias: dict[str, Float32] | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    rid: str | None = None
    priority: Int32 | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # ours
    previous_items: list[InputItem] | None = None  # the conversation of previous_response_id, which a router has read
    continuation: Continuation | None = None


_decoder = BodyDecoder(ResponseRequest, RESPONSE)


def decode_response(body: bytes) -> ResponseRequest:
    """Raises InvalidRequest."""
    request = _decoder.decode(body)
    check_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    check_range("max_tool_calls", request.max_tool_calls, 1, 2**31 - 1)
    return request


# ---------------------------------------------------------------- answer


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


class OutputServerCall(msgspec.Struct):
    """A call of a tool that the server ran, or runs."""

    id: str
    server_label: str
    name: str
    arguments: str
    status: str
    output: str | None = None
    error: str | None = None
    approval_request_id: None = None
    type: str = "mcp_call"


OutputItem = OutputMessage | OutputReasoning | OutputCall | OutputServerCall


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
    """``output`` holds OutputItems; ``status`` is queued, in_progress, completed, incomplete, failed or
    cancelled."""

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
    previous_response_id: str | None = None
    max_tool_calls: int | None = None
    background: bool = False
    store: bool = False
    truncation: str = "disabled"
    service_tier: str = "default"
    object: str = "response"


class ResponseDeleted(msgspec.Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class Conversation(msgspec.Struct):
    """All items of a response, its input and its output: what ``previous_response_id`` stands for."""

    items: list[msgspec.Raw]


class Events:
    """Events of one stream, numbered as they are made, from ``first`` on."""

    def __init__(self, first: int) -> None:
        self._sequence_number = first

    def make(self, kind: str, **fields: Any) -> bytes:
        """One server-sent event, named by ``type`` twice, as OpenAI does."""
        body = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return b"event: " + kind.encode() + b"\ndata: " + encode(body) + b"\n\n"
