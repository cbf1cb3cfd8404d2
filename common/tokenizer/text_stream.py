"""Incremental detokenization of one request, with its stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from ..api.messages import Finish
from ..api.sampling import SamplingParams
from .stop import StopMatcher

_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Tokens to text, a few at a time; a character whose bytes are incomplete waits for the rest.

    Bytes that can never be UTF-8 become U+FFFD, as soon as that is certain. Constant time per token.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], skipped: frozenset[int] = frozenset()):
        """``token_bytes`` gives a token's bytes; tokens in ``skipped`` have no text."""
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._decoder = _utf8("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        token_bytes, skipped = self._token_bytes, self._skipped
        return self._decoder.decode(b"".join([token_bytes(token) for token in token_ids if token not in skipped]))

    def finish(self) -> str:
        """The rest of an incomplete character."""
        return self._decoder.decode(b"", final=True)


class TextStream:
    """Detokenizes one request and watches for its stop strings."""

    def __init__(self, token_bytes: Callable[[int], bytes], special_ids: frozenset[int], sampling: SamplingParams):
        self._detokenizer = Detokenizer(token_bytes, special_ids if sampling.skip_special_tokens else frozenset())
        self._matcher = StopMatcher(sampling.stop, not sampling.no_stop_trim, sampling.stop_regex)
        self._trim = not sampling.no_stop_trim

    @property
    def may_match(self) -> bool:
        """True where the request has stop strings or expressions."""
        return self._matcher.may_match

    @property
    def matched(self) -> str | None:
        """The stop string or expression that ended the text; what comes after it is dropped."""
        return self._matcher.matched

    def push(self, token_ids: Sequence[int], finish: Finish | None) -> str:
        """The text that became certain. ``finish`` ends the text: then all of the rest comes out, without the stop
        token that the engine matched (unless the request asks for it)."""
        if finish is None:
            return self._matcher.push(self._detokenizer.push(token_ids))
        if self._trim and finish.matched is not None and token_ids and token_ids[-1] == finish.matched:
            token_ids = token_ids[:-1]
        text = self._matcher.push(self._detokenizer.push(token_ids) + self._detokenizer.finish())
        return text + self._matcher.finish()
