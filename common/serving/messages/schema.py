"""``/v1/messages``: its answer, the events of its stream, and its errors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...api.errors import ServingError
from ..protocol.responses import encode

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
