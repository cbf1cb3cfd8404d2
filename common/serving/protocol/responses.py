"""Answers and stream events of chat and text completions, field by field as OpenAI's clients parse them."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

encode = msgspec.json.Encoder().encode

DONE = b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


FinishReason = Literal["stop", "length", "tool_calls", "abort"]


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    reasoning_tokens: int | UnsetType = UNSET  # SGLang's place of what completion_tokens_details tells
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET

    @classmethod
    def of(cls, prompt_tokens: int, cached_tokens: int | None, completion_tokens: int) -> Usage:
        """``cached_tokens`` None: they are not told."""
        return cls(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens,
                   UNSET if cached_tokens is None else PromptTokensDetails(cached_tokens))

    @property
    def cached_tokens(self) -> int:
        """Those that are told."""
        details = self.prompt_tokens_details
        return details.cached_tokens if details else 0


# ---------------------------------------------------------------- chat


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCallOut(msgspec.Struct):
    id: str
    function: CalledFunction
    type: str = "function"


class ChatMessage(msgspec.Struct):
    content: str | None
    tool_calls: list[ToolCallOut] | UnsetType = UNSET
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    matched_stop: int | str | None = None


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class CalledFunctionDelta(msgspec.Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct):
    """A call's first delta has ``id`` and name; later ones add to the arguments of the call at ``index``."""

    index: int
    function: CalledFunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    matched_stop: int | str | None | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    object: str = "chat.completion.chunk"


# ---------------------------------------------------------------- text


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """A whole answer, or one chunk of a stream: OpenAI gives both the same shape."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    object: str = "text_completion"
