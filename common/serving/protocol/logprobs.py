"""Log-probabilities in the APIs' shapes."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from ...api.messages import Logprobs

Piece = Callable[[int], bytes]
"""The bytes that a token stands for."""

_LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot hold


def finite(value: float | None) -> float:
    """The value, or the lowest one for minus infinity and for a token without any."""
    return value if value is not None and math.isfinite(value) else _LOWEST


def chat_logprobs(found: Logprobs, piece: Piece) -> ChatLogprobs:
    tops = found.top or [[]] * len(found.token_ids)
    return ChatLogprobs([
        TokenLogprob(_text(piece(token)), finite(value), list(piece(token)),
                     [TopLogprob(_text(piece(other)), finite(theirs), list(piece(other))) for other, theirs in top])
        for token, value, top in zip(found.token_ids, found.values, tops)])


def completion_logprobs(found: Logprobs, piece: Piece, offset: int) -> CompletionLogprobs:
    """``offset``: characters of the choice's text before the first of these tokens.

    A prompt's first token, which nothing predicts, has null for its log-probabilities.
    """
    tokens = [_text(piece(token)) for token in found.token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [None if value is None else {_text(piece(other)): finite(theirs) for other, theirs in top}
            for value, top in zip(found.values, found.top)] if found.top else None
    return CompletionLogprobs(tokens, [_known(value) for value in found.values], tops, offsets)


NativeLogprob = tuple[float | None, int, str | None]
"""SGLang's ``[logprob, token id, text]``; the text is null where none is wanted."""


def native_logprobs(found: Logprobs, piece: Piece | None) -> list[NativeLogprob]:
    """No ``piece``: no texts."""
    return [_native(token, value, piece) for token, value in zip(found.token_ids, found.values)]


def native_lists(lists: list[list[tuple[int, float]]], piece: Piece | None) -> list[list[NativeLogprob] | None]:
    """``top`` or ``of_ids`` of log-probabilities; null where nothing predicts the token."""
    return [[_native(token, value, piece) for token, value in one] or None for one in lists]


def _native(token: int, value: float | None, piece: Piece | None) -> NativeLogprob:
    return _known(value), token, None if piece is None else _text(piece(token))


def _known(value: float | None) -> float | None:
    return None if value is None else finite(value)


def joined(parts: list[Logprobs]) -> Logprobs | None:
    """Consecutive log-probabilities as one, None for no parts."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    return Logprobs([t for p in parts for t in p.token_ids], [v for p in parts for v in p.values],
                    [top for p in parts for top in p.top], [pairs for p in parts for pairs in p.of_ids])


def _text(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")


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
