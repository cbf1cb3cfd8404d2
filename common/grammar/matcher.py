"""The grammar matcher of a request: tracks its output in the grammar, and masks the next token."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..api.drafts import Drafts
from ..api.errors import InvalidRequest, ServingError
from ..api.sampling import SamplingParams
from ..request.token_buffer import TokenBuffer
from .backend import GrammarState, TooComplex

log = logging.getLogger("baton.grammar")

_BUDGET_SECONDS = 1.0
_BUDGET_SECONDS_PER_TOKEN = 0.005
"""Processor seconds that matching one grammar may take, in all and for each token. JSON takes 0.1 to 0.5 ms a token; an
ambiguous grammar such as 'root ::= root root | "a"' 90 ms at its 560th token, and ever more."""


class Matcher:
    """Tracks one request's output, and determines which tokens may come next.

    ``stop_ids`` (including the model's end-of-sequence tokens) end the request: they are allowed only where the grammar
    may end, and exclusively where it must. A matcher that fails, for example on tokens that its grammar forbids, allows
    only ``end_ids`` from then on: the request ends with the next token, and ``error`` says why.
    """

    def __init__(self, begin: Callable[[], GrammarState] | None, tokens: TokenBuffer, start: int,
                 stop_ids: frozenset[int], end_ids: frozenset[int], sampling: SamplingParams,
                 error: ServingError | None = None):
        """The output begins at ``tokens[start]``. ``end_ids``: the end-of-sequence tokens, at least one of them.
        ``begin`` returns the grammar's beginning, and is None where there is an ``error`` already."""
        self._begin = begin
        self.grammar = None if begin is None else begin()
        self.error = error
        self._tokens = tokens
        self._start = start
        self._stop_ids = stop_ids
        self._end_ids = end_ids
        self._sampling = sampling
        self._accepted = start  # tokens before this position have been accepted
        self._spent_seconds = 0.0
        self._path: list[int] = []  # drafts that ``grammar`` has accepted after these
        self._draft_seconds = 0.0
        self._broke = False  # on a draft, whose mask is not filled
        self._pending: int | None = None  # an accepted token that ``tokens`` may not contain yet

    def advance(self, pending: int | None = None) -> bool:
        """Accepts the request's new tokens; ``pending`` is another one, which ``tokens`` do not contain yet.

        Returns False where no mask is needed: ``pending`` has ended the request.
        """
        if pending is not None and pending in self._stop_ids:
            return False
        self.move(())
        began = time.thread_time()
        for token in self._tokens.view(self._accepted).tolist():
            self._accept(token)
        self._pending = pending
        if pending is not None:
            self._accept(pending)
        self.charge(time.thread_time() - began)
        return True

    def allowed(self, drafts: Drafts) -> Drafts | None:
        """See OutputMatcher. The request's tokens must have been accepted."""
        if self.error is not None or self._draft_seconds > self._budget:
            return None
        found = drafts.only([drafts.tokens[i] not in self._stop_ids and self.move(path)
                             for i, path in enumerate(drafts.paths())])
        self.move(())
        return found

    def move(self, path: Sequence[int]) -> bool:
        """See OutputMatcher. Its time is the drafts', not the output's: a request may lose its drafts by it, and does
        not fail."""
        if not path and not self._path:
            return True
        if self.grammar is None or path and (self.error is not None or self._draft_seconds > self._budget):
            return False
        began = time.thread_time()
        try:
            return self._move(path)
        except RuntimeError:
            self._restart()
            return False
        finally:
            self._draft_seconds += time.thread_time() - began

    def _move(self, path: Sequence[int]) -> bool:
        assert self.grammar is not None
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        if common < len(self._path):
            self.grammar.rollback(len(self._path) - common)
            del self._path[common:]
        for token in path[common:]:
            if token in self._stop_ids or not self.grammar.accept_token(token):
                return False
            self._path.append(token)
        return True

    def _restart(self) -> None:
        """Follows the accepted tokens anew, without drafts from now on: one has broken ``grammar``. Called in its
        exception handler."""
        log.exception("a grammar's matcher failed on drafts after %d tokens", len(self) - len(self._path))
        assert self._begin is not None
        self._path.clear()
        self._draft_seconds = math.inf
        self.grammar = self._begin()
        tokens = self._tokens.view(self._start, self._accepted).tolist()
        if self._pending is not None and len(tokens) < self._accepted - self._start:
            tokens.append(self._pending)
        if not all(map(self._match, tokens)):
            self._fail_internally()

    def charge(self, seconds: float) -> None:
        """Adds processor time of this grammar; the matcher fails where it takes too much of the step loop's, which all
        requests share."""
        if self._path:
            self._draft_seconds += seconds
            return
        self._spent_seconds += seconds
        if self._spent_seconds > self._budget:
            self._fail(f"The grammar is too ambiguous: following it took {self._spent_seconds:.1f} s for {len(self)} "
                       "tokens; simplify it.")

    @property
    def _budget(self) -> float:
        return _BUDGET_SECONDS + _BUDGET_SECONDS_PER_TOKEN * len(self)

    def _accept(self, token: int) -> None:
        position, self._accepted = self._accepted, self._accepted + 1
        if self.error is None and not self._match(token):
            self._fail(f"Token {token}, number {position - self._start + 1} of the output, does not follow the "
                       "grammar; servers that share an answer must be started with the same grammar flags.")

    def _match(self, token: int) -> bool:
        """Accepts a token. A stop token within an output (sent by a client) terminates the matcher, which then fills no
        mask any more."""
        if self.grammar is None:
            return False
        try:
            return self.grammar.accept_token(token) and not self.grammar.is_terminated()
        except RuntimeError as error:
            self._fail_by(error)
            return True

    def fill(self, words: np.ndarray, row: int) -> None:
        """Sets the bits of ``words[row]`` (int32 words) to the tokens that may follow; charges this request for the
        time, and fails it where the library fails, unless on a draft."""
        assert self.grammar is not None
        began = time.thread_time()
        try:
            self.grammar.fill_next_token_bitmask(words, row)
        except RuntimeError as error:
            if self._path:
                self._broke = True
                self._restart()
            else:
                self._fail_by(error)
        self.charge(time.thread_time() - began)

    def finish_mask(self, mask: np.ndarray) -> bool:
        """Sets the bits of tokens that end the request in ``mask`` (uint32 words, which ``grammar`` has filled).

        Returns False where nothing can follow a draft: the request fails once the draft is among its tokens."""
        if self._broke:
            self._broke = False
            return False
        if self.error is None and self.grammar is not None:
            _set(mask, self._stop_ids, self.grammar.is_completed())
            if self._forbids_end(mask) or mask.any():
                return True
            if self._path:
                return False
            self._fail("No token of the model can follow in this grammar.")
        mask[:] = 0
        _set(mask, self._end_ids, True)
        return True

    def _forbids_end(self, mask: np.ndarray) -> bool:
        """Clears the bits of ending tokens where the request must not end yet and the grammar can continue; returns
        whether it did."""
        forbidden: frozenset[int] = frozenset()
        if len(self) < self._sampling.min_new_tokens:
            forbidden = self._stop_ids
        elif self._sampling.ignore_eos:
            forbidden = self._end_ids - set(self._sampling.stop_token_ids)
        if not forbidden:
            return False
        with_ends = mask.copy()
        _set(mask, forbidden, False)
        if mask.any():
            return True
        mask[:] = with_ends
        return False

    def __len__(self) -> int:
        """The number of output tokens that were accepted, and of drafts after them."""
        return self._accepted - self._start + len(self._path)

    def error_at_end(self) -> ServingError | None:
        """Returns why the output, which ends with one of ``stop_ids``, does not match the grammar; None where it
        does."""
        self.move(())
        if self.error is None:
            for token in self._tokens.view(self._accepted, len(self._tokens) - 1).tolist():
                self._accept(token)
        if self.error is None and self.grammar is not None and not self.grammar.is_completed():
            self._fail("The output ended where its grammar may not end.")
        return self.error

    def _fail_by(self, error: RuntimeError) -> None:
        """Fails after an error of the library; called in its exception handler."""
        if isinstance(error, TooComplex):
            self._fail(f"The grammar is too complex to be followed after {len(self)} tokens: {error}; simplify it.")
        else:
            self._fail_internally()

    def _fail_internally(self) -> None:
        """Fails after an internal error of the library; called in its exception handler."""
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
