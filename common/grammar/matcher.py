"""Where an answer stands in its grammar."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import numpy as np
import xgrammar

from ..api.errors import InvalidRequest, ServingError
from ..api.sampling import SamplingParams
from ..request.token_buffer import TokenBuffer

log = logging.getLogger("baton.grammar")

# Seconds of a processor that following one grammar may take: this much, and as much more for each token. JSON takes 0.1
# to 0.5 ms a token; an ambiguous grammar such as 'root ::= root root | "a"' 90 ms at its 560th, and ever more.
_ALLOWANCE = 1.0
_ALLOWANCE_PER_TOKEN = 0.005


class Matcher:
    """Follows one request's output, and says which tokens may come next.

    ``stop_ids`` (the model's end-of-sequence tokens among them) end the request: they are allowed only where the
    grammar may end, and there alone where it must. A matcher that fails, on tokens that its grammar forbids for
    example, allows ``end_ids`` alone from then on: the request ends with the next token, and ``error`` says why.
    """

    def __init__(self, compiled: xgrammar.CompiledGrammar | None, tokens: TokenBuffer, start: int,
                 stop_ids: frozenset[int], end_ids: frozenset[int], sampling: SamplingParams,
                 error: ServingError | None = None):
        """The output begins at ``tokens[start]``. ``end_ids``: the end-of-sequence tokens, at least one of them.
        ``compiled`` is None where there is an ``error`` already."""
        self.grammar = None if compiled is None else xgrammar.GrammarMatcher(compiled)
        self.error = error
        self._tokens = tokens
        self._start = start
        self._stop_ids = stop_ids
        self._end_ids = end_ids
        self._sampling = sampling
        self._accepted = start  # tokens before this one are behind the matcher
        self._spent = 0.0

    def advance(self, pending: int | None = None) -> bool:
        """Take in what the request has gained; ``pending`` is a token more, which ``tokens`` do not hold yet.

        False where no mask is wanted: ``pending`` has ended the request.
        """
        if pending is not None and pending in self._stop_ids:
            return False
        began = time.thread_time()
        for token in self._tokens.view(self._accepted).tolist():
            self._accept(token)
        if pending is not None:
            self._accept(pending)
        self.charge(time.thread_time() - began)
        return True

    def charge(self, seconds: float) -> None:
        """Count processor time that went into this grammar; the matcher fails where it takes too much of the step
        loop's, which all requests share."""
        self._spent += seconds
        if self._spent > _ALLOWANCE + _ALLOWANCE_PER_TOKEN * len(self):
            self._fail(f"The grammar is too ambiguous: following it took {self._spent:.1f} s for {len(self)} tokens; "
                       "simplify it.")

    def _accept(self, token: int) -> None:
        position, self._accepted = self._accepted, self._accepted + 1
        if self.error is None and not self._takes(token):
            self._fail(f"Token {token}, number {position - self._start + 1} of the output, does not follow the "
                       "grammar; servers that share an answer must be started with the same grammar flags.")

    def _takes(self, token: int) -> bool:
        """A stop token inside of an output (told by a client) ends the matcher, which then makes no mask any more."""
        if self.grammar is None:
            return False
        try:
            return self.grammar.accept_token(token) and not self.grammar.is_terminated()
        except RuntimeError:
            self._fail_within()
            return True

    def fill(self, words: np.ndarray, row: int) -> None:
        """Set the bits of ``words[row]`` (int32 words) to the tokens that may follow; this request alone pays, with its
        time and, where xgrammar fails, with its end."""
        assert self.grammar is not None
        began = time.thread_time()
        try:
            self.grammar.fill_next_token_bitmask(words, row)
        except RuntimeError:
            self._fail_within()
        self.charge(time.thread_time() - began)

    def finish_mask(self, mask: np.ndarray) -> None:
        """Settle the tokens that end the request in ``mask`` (uint32 words, which ``grammar`` has filled)."""
        if self.error is None and self.grammar is not None:
            _set(mask, self._stop_ids, self.grammar.is_completed())
            if self._must_go_on(mask):
                return
            if mask.any():
                return
            self._fail("No token of the model can follow in this grammar.")
        mask[:] = 0
        _set(mask, self._end_ids, True)

    def _must_go_on(self, mask: np.ndarray) -> bool:
        """Take the ends out of the mask where the request does not want to end yet and the grammar can go on."""
        unwanted: frozenset[int] = frozenset()
        if len(self) < self._sampling.min_new_tokens:
            unwanted = self._stop_ids
        elif self._sampling.ignore_eos:
            unwanted = self._end_ids - set(self._sampling.stop_token_ids)
        if not unwanted:
            return False
        kept = mask.copy()
        _set(mask, unwanted, False)
        if mask.any():
            return True
        mask[:] = kept
        return False

    def __len__(self) -> int:
        """Tokens of the output that were taken in."""
        return self._accepted - self._start

    def error_at_end(self) -> ServingError | None:
        """Why the output, which ends with one of ``stop_ids``, is not what the grammar describes."""
        if self.error is None:
            for token in self._tokens.view(self._accepted, len(self._tokens) - 1).tolist():
                self._accept(token)
        if self.error is None and self.grammar is not None and not self.grammar.is_completed():
            self._fail("The output ended where its grammar may not end.")
        return self.error

    def _fail_within(self) -> None:
        """xgrammar has thrown what it throws for its own mistakes; called where that is being handled."""
        log.exception("a grammar's matcher failed after %d tokens", len(self))
        self.error = self.error or ServingError("The grammar could not be followed; the server's log says why.")

    def _fail(self, reason: str) -> None:
        self.error = self.error or InvalidRequest(reason)


def _set(mask: np.ndarray, tokens: Iterable[int], allowed: bool) -> None:
    for token in tokens:
        bit = np.uint32(1 << token % 32)
        if allowed:
            mask[token // 32] |= bit
        else:
            mask[token // 32] &= ~bit
