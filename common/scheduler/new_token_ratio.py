"""How much room running requests are left to grow into before another one is admitted.

The idea is SGLang's new-token ratio: requests rarely use all of the output that they may ask for, so a share of
what they have left is reserved. The share falls while that turns out well, and rises when requests had to be retracted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..request.req import Req

_FIRST = 0.7
_LEAST = 0.14  # of the first share
_FALL = 0.001  # in a decode step: from the first share to the least in 600
_LONGEST = 4096  # tokens that one request is expected to need at most
_GROWTH = 20  # tokens that each request is to gain before the next retraction


def left_of(req: Req) -> int:
    """Output tokens that are counted for ``req``: those that it may still ask for, up to a bound."""
    left = req.num_prompt_tokens + req.sampling.max_new_tokens - req.tokens.count - req.num_pending
    return min(left, _LONGEST) if left > 0 else 0


def one_less(left: np.ndarray) -> int:
    """How much the sum of ``left_of`` falls when requests that may ask for ``left`` [n] more, at least one each, gain
    one."""
    return int(np.count_nonzero(left <= _LONGEST))


class NewTokenRatio:
    """``ratio`` of their remaining output is reserved for all requests that run, the one to be admitted among them.

    ``conservativeness`` scales the share that it begins with and falls to; 0 reserves nothing, whatever happens. The
    share never exceeds 1.
    """

    def __init__(self, conservativeness: float):
        self._first = min(1.0, _FIRST * conservativeness)
        self.ratio = self._first

    def __repr__(self) -> str:
        return f"NewTokenRatio({self.ratio:.3f})"

    def decoded(self) -> None:
        """A decode step was made, and nobody had to be retracted for it."""
        self.ratio = max(self.ratio - _FALL, self._first * _LEAST)

    def retracted(self, running: Iterable[Req]) -> None:
        """Pages ran out; ``running`` are those that go on. Expect that they use as much as they have until now."""
        if not self._first:
            return
        used = total = 0
        for req in running:
            used += req.num_output_tokens + _GROWTH
            total += req.sampling.max_new_tokens
        self.ratio = min(1.0, max(self.ratio, used / (total + 1)))

    def tokens(self, left: int) -> int:
        """To be kept free for requests that have ``left`` (the sum of ``left_of``) before them."""
        return int(self.ratio * left)
