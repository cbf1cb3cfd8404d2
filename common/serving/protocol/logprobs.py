"""Log-probabilities in the APIs' shapes."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from ...api.messages import Logprobs

TokenBytes = Callable[[int], bytes]
"""A function that returns a token's bytes."""

_LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot hold


def finite(value: float | None) -> float:
    """The value, or the lowest one for minus infinity and for a token without any."""
    return value if value is not None and math.isfinite(value) else _LOWEST


def chat_logprobs(logprobs: Logprobs, token_bytes: TokenBytes) -> ChatLogprobs:
    tops = logprobs.top or [[]] * len(logprobs.token_ids)
    return ChatLogprobs([
        TokenLogprob(_text(token_bytes(token)), finite(value), list(token_bytes(token)),
                     [TopLogprob(_text(token_bytes(other)), finite(other_value), list(token_bytes(other)))
                      for other, other_value in top])
        for token, value, top in zip(logprobs.token_ids, logprobs.values, tops)])


def completion_logprobs(logprobs: Logprobs, token_bytes: TokenBytes, offset: int) -> CompletionLogprobs:
    """``offset``: characters of the choice's text before the first of these tokens.

    A prompt's first token, which nothing predicts, has null for its log-probabilities.
    """
    tokens = [_text(token_bytes(token)) for token in logprobs.token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [None if value is None else {_text(token_bytes(other)): finite(other_value) for other, other_value in top}
            for value, top in zip(logprobs.values, logprobs.top)] if logprobs.top else None
    return CompletionLogprobs(tokens, [_known(value) for value in logprobs.values], tops, offsets)


NativeLogprob = tuple[float | None, int, str | None]
"""SGLang's ``[logprob, token id, text]``; the text is null where the request asks for none."""


def native_logprobs(logprobs: Logprobs, token_bytes: TokenBytes | None) -> list[NativeLogprob]:
    """SGLang's triples; without ``token_bytes`` their texts are null."""
    return [_native(token, value, token_bytes) for token, value in zip(logprobs.token_ids, logprobs.values)]


def native_lists(lists: list[list[tuple[int, float]]],
                 token_bytes: TokenBytes | None) -> list[list[NativeLogprob] | None]:
    """``top`` or ``of_ids`` of log-probabilities; null where nothing predicts the token."""
    return [[_native(token, value, token_bytes) for token, value in one] or None for one in lists]


def _native(token: int, value: float | None, token_bytes: TokenBytes | None) -> NativeLogprob:
    return _known(value), token, None if token_bytes is None else _text(token_bytes(token))


def _known(value: float | None) -> float | None:
    return None if value is None else finite(value)


def joined(parts: list[Logprobs]) -> Logprobs | None:
    """Consecutive log-probabilities joined, None for no parts."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return Logprobs([t for p in parts for t in p.token_ids], [v for p in parts for v in p.values],
                    [top for p in parts for top in p.top], [pairs for p in parts for pairs in p.of_ids])


def _text(token_bytes: bytes) -> str:
    return token_bytes.decode("utf-8", "replace")


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


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class LogprobOptions(msgspec.Struct, frozen=True):
    """The log-probabilities that one prompt's answer reports."""

    enabled: bool = False
    start: int = -1
    num_top: int = 0
    token_ids: tuple[int, ...] = ()
