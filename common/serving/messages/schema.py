"""``/v1/messages``: its answer, the events of its stream, and its errors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...api.errors import InvalidRequest, ServingError
from ...api.wire import Float32, Int32
from ..protocol.bootstrap import BootstrapFields
from ..protocol.continuation import Continuation
from ..protocol.decoding import BodyDecoder
from ..protocol.encoding import encode
from ..protocol.unsupported_fields import ANTHROPIC


class ContentBlock(msgspec.Struct):
    """A block of a message, by ``type``: text, thinking, tool_use or tool_result; images and documents are refused."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None


class InputMessage(msgspec.Struct):
    role: str
    content: str | list[ContentBlock]


class ToolDefinition(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    # refused (see unsupported_fields.TOOL)
    defer_loading: Any = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """``display`` omitted: answers have empty blocks of thinking."""

    type: str
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class Conversation(BootstrapFields, kw_only=True):
    """The fields that sending a message and counting its tokens share."""

    messages: list[InputMessage]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(Conversation, kw_only=True):
    max_tokens: Int32
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    top_k: Int32 | None = None
    metadata: dict[str, Any] | None = None
    # SGLang's
    rid: str | None = None
    priority: Int32 | None = None
    # ours
    continuation: Continuation | None = None


_messages = BodyDecoder(MessagesRequest, ANTHROPIC)
_count = BodyDecoder(Conversation, ANTHROPIC)


def decode_messages(body: bytes) -> MessagesRequest:
    """Raises InvalidRequest."""
    request = _messages.decode(body)
    if request.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be 1 or more, got {request.max_tokens}.", param="max_tokens")
    return request


def decode_count(body: bytes) -> Conversation:
    """Raises InvalidRequest."""
    return _count.decode(body)


# ---------------------------------------------------------------- answer


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct):
    text: str
    type: str = "text"


class ThinkingBlock(msgspec.Struct):
    """``signature`` is empty: the block is taken back as it is."""

    thinking: str
    signature: str = ""
    type: str = "thinking"


class ToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: msgspec.Raw | dict[str, Any]
    type: str = "tool_use"


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """``input_tokens`` are those that were not read from the prefix cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class AnswerMessage(msgspec.Struct):
    """``content`` holds AnswerBlocks."""

    id: str
    model: str
    content: list[Any]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: str = "assistant"
    type: str = "message"


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessagesErrorDetails(msgspec.Struct):
    type: str
    message: str
    param: str | None | UnsetType = UNSET


class MessagesError(msgspec.Struct):
    error: MessagesErrorDetails
    type: str = "error"


_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 409: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error",
}


def error_body(error: ServingError) -> MessagesError:
    param = UNSET if error.param is None else error.param
    return MessagesError(MessagesErrorDetails(_ERROR_TYPES.get(error.status, "api_error"), error.message, param))


def event(kind: str, **fields: Any) -> bytes:
    """One server-sent event."""
    return b"event: " + kind.encode() + b"\ndata: " + encode({"type": kind, **fields}) + b"\n\n"
