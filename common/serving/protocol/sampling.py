"""Requests of OpenAI's chat and text completions, with the extra fields of SGLang.

Every field may be null, which means its default: clients send nulls.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...api.errors import InvalidRequest
from ...api.grammar import GrammarSpec
from ...api.sampling import SamplingParams
from ...api.wire import Float32, Int32, Int64
from ...tokenizer.stop_regex import stop_expression
from .bootstrap import BootstrapFields
from .continuation import Continuation
from .decoding import BodyDecoder
from .unsupported_fields import CHAT, COMPLETION

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_COMPLETION_LOGPROBS = 5
MAX_STOPS = 64
MAX_STOP_EXPRESSIONS = 8


class StreamOptions(msgspec.Struct):
    """``continuous_usage_stats``: every chunk tells its choice's tokens so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(BootstrapFields, kw_only=True):
    """What chat and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    temperature: Float32 | None = None
    top_p: Float32 | None = None
    max_tokens: Int32 | None = None
    stop: str | list[str] | None = None
    stop_regex: str | list[str] | None = None
    seed: Int64 | None = None
    frequency_penalty: Float32 | None = None
    presence_penalty: Float32 | None = None
    logit_bias: dict[str, Float32] | None = None
    # SGLang's
    repetition_penalty: Float32 | None = None
    top_k: Int32 | None = None
    min_p: Float32 | None = None
    min_tokens: Int32 | None = None
    stop_token_ids: list[Int32] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    rid: str | list[str] | None = None
    priority: Int32 | None = None
    # Baton's
    continuation: Continuation | None = None
    # grammars: one at most (see structured.py)
    response_format: dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


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
    # refused (see unsupported_fields.MESSAGE)
    function_call: Any = None
    tools: Any = None
    audio: Any = None


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    function: Function
    type: str = "function"


class Reasoning(msgspec.Struct):
    """OpenRouter's and SGLang's form of ``reasoning_effort``."""

    effort: str | None = None
    enabled: bool | None = None


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
    # SGLang's and vLLM's
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None

    @property
    def requested_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionRequest(CommonFields, kw_only=True):
    prompt: str | list[str | Int32 | list[Int32]]
    logprobs: Int32 | None = None
    best_of: Int32 | None = None
    echo: bool | None = None

    @property
    def num_made(self) -> int:
        """Choices that are made of each prompt; ``num_choices`` of them are told."""
        return self.num_choices if self.best_of is None else self.best_of


_chat = BodyDecoder(ChatRequest, CHAT)
_completion = BodyDecoder(CompletionRequest, COMPLETION)


def decode_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest."""
    return check_chat(_chat.decode(body))


def check_chat(request: ChatRequest) -> ChatRequest:
    """The same request, whose values agree with each other. Raises InvalidRequest."""
    _check_common(request)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")
    check_range("top_logprobs", request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    return request


def decode_completion(body: bytes) -> CompletionRequest:
    """Raises InvalidRequest."""
    request = _completion.decode(body)
    _check_common(request)
    check_range("logprobs", request.logprobs, 0, MAX_COMPLETION_LOGPROBS)
    check_range("best_of", request.best_of, request.num_choices, MAX_CHOICES)
    if request.stream and request.num_made > request.num_choices:
        raise InvalidRequest("best_of cannot be streamed: the best choice is known at the end; leave out either.",
                             param="best_of")
    return request


def _check_common(request: CommonFields) -> None:
    check_range("n", request.n, 1, MAX_CHOICES)
    check_range("priority", request.priority, -(2**31), 2**31)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")


def check_range(name: str, value: int | None, low: int, high: int) -> None:
    """Raises InvalidRequest for a value outside ``low..high``; None is fine."""
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}.", param=name)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Raises InvalidRequest for more than the server matches."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop holds {len(stops)} strings; at most {MAX_STOPS} are supported.", param="stop")
    return stops


def stop_expressions(given: str | list[str] | None) -> tuple[str, ...]:
    """Raises InvalidRequest for expressions that cannot be followed, or too many."""
    patterns = (given,) if isinstance(given, str) else tuple(given or ())
    if len(patterns) > MAX_STOP_EXPRESSIONS:
        raise InvalidRequest(f"stop_regex holds {len(patterns)} expressions; at most {MAX_STOP_EXPRESSIONS} are "
                             "supported.", param="stop_regex")
    for pattern in patterns:
        stop_expression(pattern)
    return patterns


def biases(given: dict[str, float] | None) -> dict[int, float] | None:
    """OpenAI's ``logit_bias``, whose keys are token ids as strings. Raises InvalidRequest."""
    if given is None:
        return None
    wrong = next((key for key in given if not (key.isascii() and key.isdigit() and len(key) < 20)), None)
    if wrong is not None:
        raise InvalidRequest(f"logit_bias must have token ids as its keys, got {wrong[:80]!r}.", param="logit_bias")
    return {int(key): value for key, value in given.items()}


def sampling_params(request: CommonFields, requested_tokens: int | None, default_tokens: int, *, vocab_size: int,
                    grammar: GrammarSpec | None = None, tokens_name: str = "max_tokens") -> SamplingParams:
    """Sampling parameters, validated; ``default_tokens`` is the output's length where none is requested.

    ``grammar`` is the one that the answer obeys, see ``grammar_field``. Raises InvalidRequest.
    """
    max_new_tokens = default_tokens if requested_tokens is None else requested_tokens
    if max_new_tokens < 0:
        raise InvalidRequest(f"{tokens_name} must be 0 or more, got {max_new_tokens}.", param=tokens_name)
    if request.min_tokens is not None and not 0 <= request.min_tokens <= max_new_tokens:
        raise InvalidRequest(f"min_tokens must be between 0 and {tokens_name} ({max_new_tokens}), "
                             f"got {request.min_tokens}.", param="min_tokens")
    stop_regex, logit_bias = stop_expressions(request.stop_regex), biases(request.logit_bias)
    return validated_params(
        vocab_size, max_new_tokens, request.stop, request.top_k, request.stop_token_ids, stop_regex=stop_regex,
        grammar=grammar, min_new_tokens=request.min_tokens, temperature=request.temperature, top_p=request.top_p,
        min_p=request.min_p, frequency_penalty=request.frequency_penalty, presence_penalty=request.presence_penalty,
        repetition_penalty=request.repetition_penalty, logit_bias=logit_bias,
        seed=request.seed, ignore_eos=request.ignore_eos, skip_special_tokens=request.skip_special_tokens,
        no_stop_trim=request.no_stop_trim)


def validated_params(vocab_size: int, max_new_tokens: int, stop: str | list[str] | None, top_k: int | None,
                     stop_token_ids: list[int] | None, **others: Any) -> SamplingParams:
    """Raises InvalidRequest; None leaves a parameter at its default. ``top_k`` 0 also means all tokens to some clients,
    and more than all is all."""
    given = {name: value for name, value in others.items() if value is not None}
    if top_k is not None:
        given["top_k"] = -1 if top_k == 0 else min(top_k, vocab_size)
    params = SamplingParams(max_new_tokens=max_new_tokens, stop=stop_strings(stop),
                            stop_token_ids=tuple(stop_token_ids or ()), **given)
    params.validate(vocab_size)
    return params
