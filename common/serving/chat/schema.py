"""``/v1/chat/completions``: request, answer and chunks, field by field as OpenAI's clients send and parse them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ...api.errors import InvalidRequest
from ...api.wire import Int32
from ..protocol.answer_metadata import AnswerMetadata
from ..protocol.decoding import BodyDecoder
from ..protocol.logprobs import ChatLogprobs
from ..protocol.sampling import MAX_TOP_LOGPROBS, CommonFields, check_common_fields, check_range
from ..protocol.unsupported_fields import CHAT
from ..protocol.usage import FinishReason, SglExt, Usage


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str = "function"


class Message(msgspec.Struct):
    role: str
    content: str | list[str | ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None  # DeepSeek's: the answer continues this last message of the assistant
    # refused (see unsupported_fields.MESSAGE)
    phase: Any = None
    function_call: Any = None
    tools: Any = None
    audio: Any = None

    @property
    def text(self) -> str:
        """The text of the content; parts other than text are ignored."""
        if not isinstance(self.content, list):
            return self.content or ""
        return "".join(part if isinstance(part, str) else part.text or "" for part in self.content)


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


    # refused (see unsupported_fields.TOOL)
    defer_loading: Any = None


class Tool(msgspec.Struct):
    function: Function
    type: str = "function"
    # refused (see unsupported_fields.TOOL)
    defer_loading: Any = None


class Reasoning(msgspec.Struct):
    """OpenRouter's and SGLang's form of ``reasoning_effort``."""

    effort: str | None = None
    enabled: bool | None = None


class ThinkingOptions(msgspec.Struct):
    """Whether the model shall reason, as GLM's, Kimi's and DeepSeek's APIs ask for it."""

    type: Literal["enabled", "disabled", "adaptive"]


class ChatRequest(CommonFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    reasoning: Reasoning | None = None
    thinking: ThinkingOptions | None = None
    # SGLang's and vLLM's
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_input_ids_in_sglext: bool | None = None
    return_output_ids_in_sglext: bool | None = None
    chat_template: str | None = None

    @property
    def requested_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_chat = BodyDecoder(ChatRequest, CHAT)


def decode_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest."""
    return check_chat(_chat.decode(body))


def check_chat(request: ChatRequest) -> ChatRequest:
    """The same request, whose values agree with each other. Raises InvalidRequest."""
    check_common_fields(request)
    if request.messages and request.messages[-1].prefix:
        request.continue_final_message = True
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    check_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    return request


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
    hidden_states: list[float] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    response_token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metadata: AnswerMetadata
    object: str = "chat.completion"
    sglext: SglExt | UnsetType = UNSET


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
    hidden_states: list[float] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    matched_stop: int | str | None | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metadata: AnswerMetadata | UnsetType = UNSET
    object: str = "chat.completion.chunk"
    sglext: SglExt | UnsetType = UNSET
