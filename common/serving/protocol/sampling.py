"""The fields that chat and text completions share, with the extra fields of SGLang, and their sampling parameters.

Every field may be null, which means its default: clients send nulls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ...api.errors import InvalidRequest
from ...api.grammar import GrammarSpec
from ...api.sampling import SamplingParams
from ...api.wire import Float32, Int32, Int64
from ...config.server import AnswerArgs
from ...tokenizer.stop_regex import stop_expression
from .bootstrap import BootstrapFields
from .continuation import Continuation
from .session_params import SessionParams

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_EXPRESSIONS = 8


class StreamOptions(msgspec.Struct):
    """``continuous_usage_stats``: every chunk reports its choice's usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class CommonFields(BootstrapFields, kw_only=True):
    """The fields that chat and text completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    session_params: SessionParams | None = None
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
    custom_logit_processor: str | list[str | None] | None = None
    custom_params: dict[str, Any] | None = None
    return_hidden_states: bool | None = None
    return_token_ids: bool | None = None
    return_cached_tokens_details: bool | None = None
    # Baton's
    continuation: Continuation | None = None
    # grammars: one at most (see grammar_fields.py)
    response_format: dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | dict[str, Any] | None = None

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def reports_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def set_defaults(self, args: AnswerArgs) -> None:
        """Reports usage in streams that do not say whether to, where the server does by default."""
        options = self.stream_options
        if self.stream and args.stream_response_default_include_usage and (
                options is None or options.include_usage is None):
            self.stream_options = StreamOptions(True, None if options is None else options.continuous_usage_stats)

    @property
    def reports_usage_always(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


def check_common_fields(request: CommonFields) -> None:
    check_range("n", request.n, 1, MAX_CHOICES)
    check_range("priority", request.priority, -(2**31), 2**31)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options needs stream to be true.", param="stream_options")


def check_range(name: str, value: int | None, low: int, high: int) -> None:
    """Raises InvalidRequest for a value outside ``low..high``; None is fine."""
    if value is not None and not low <= value <= high:
        raise InvalidRequest(f"{name} must be between {low} and {high}, got {value}.", param=name)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple; raises InvalidRequest for more than the server matches."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"stop holds {len(stops)} strings; at most {MAX_STOPS} are supported.", param="stop")
    return stops


def stop_expressions(expressions: str | list[str] | None) -> tuple[str, ...]:
    """Stop expressions as a tuple; raises InvalidRequest for unusable expressions, or too many."""
    patterns = (expressions,) if isinstance(expressions, str) else tuple(expressions or ())
    if len(patterns) > MAX_STOP_EXPRESSIONS:
        raise InvalidRequest(f"stop_regex holds {len(patterns)} expressions; at most {MAX_STOP_EXPRESSIONS} are "
                             "supported.", param="stop_regex")
    for pattern in patterns:
        stop_expression(pattern)
    return patterns


def biases(logit_bias: dict[str, float] | None) -> dict[int, float] | None:
    """OpenAI's ``logit_bias``, whose keys are token ids as strings. Raises InvalidRequest."""
    if logit_bias is None:
        return None
    wrong = next((key for key in logit_bias if not (key.isascii() and key.isdigit() and len(key) < 20)), None)
    if wrong is not None:
        raise InvalidRequest(f"logit_bias must have token ids as its keys, got {wrong[:80]!r}.", param="logit_bias")
    return {int(key): value for key, value in logit_bias.items()}


def sampling_params(request: CommonFields, requested_tokens: int | None, default_tokens: int, *, vocab_size: int,
                    grammar: GrammarSpec | None = None, tokens_name: str = "max_tokens",
                    defaults: Mapping[str, float] | None = None) -> SamplingParams:
    """Sampling parameters, validated; ``default_tokens`` is the output's length where none is requested, ``defaults``
    those of other parameters.

    ``grammar`` is the one that the answer obeys, see ``grammar_field``. Raises InvalidRequest.
    """
    max_new_tokens = default_tokens if requested_tokens is None else requested_tokens
    if max_new_tokens < 0:
        raise InvalidRequest(f"{tokens_name} must be 0 or more, got {max_new_tokens}.", param=tokens_name)
    if request.min_tokens is not None and not 0 <= request.min_tokens <= max_new_tokens:
        raise InvalidRequest(f"min_tokens must be between 0 and {tokens_name} ({max_new_tokens}), "
                             f"got {request.min_tokens}.", param="min_tokens")
    for name, value in (defaults or {}).items():
        if getattr(request, name) is None:
            setattr(request, name, value)
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
    """Sampling parameters; None leaves one at its default. Raises InvalidRequest. ``top_k`` 0, or more than the
    vocabulary has, means all tokens."""
    fields = {name: value for name, value in others.items() if value is not None}
    if top_k is not None:
        fields["top_k"] = -1 if top_k == 0 else min(top_k, vocab_size)
    params = SamplingParams(max_new_tokens=max_new_tokens, stop=stop_strings(stop),
                            stop_token_ids=tuple(stop_token_ids or ()), **fields)
    params.validate(vocab_size)
    return params
