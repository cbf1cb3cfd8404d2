"""New-token ratio: the share of running requests' remaining output that admission leaves free.

The idea is SGLang's: requests rarely use all of the output that they may ask for, so only a share of the remainder is
reserved. The ratio decays while that turns out well, and rises when requests had to be retracted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..request.req import Req

_INIT_RATIO = 0.7
_MIN_RATIO_FACTOR = 0.14  # of the initial ratio
_DECAY_PER_STEP = 0.001  # a decode step: from the initial ratio to the minimum in 600
_CLIP_MAX_NEW_TOKENS = 4096  # remaining tokens that are counted for one request at most
_RETRACT_DECODE_STEPS = 20  # tokens that each request should generate before the next retraction


def remaining_output(req: Req) -> int:
    """Output tokens counted for ``req``: those that it may still generate, clipped to ``_CLIP_MAX_NEW_TOKENS``."""
    remaining = req.num_prompt_tokens + req.sampling.max_new_tokens - req.tokens.count - req.num_pending
    return min(remaining, _CLIP_MAX_NEW_TOKENS) if remaining > 0 else 0


def remaining_decrease(remaining: np.ndarray, counts: np.ndarray | None = None) -> int:
    """Decrease of the sum of ``remaining_output`` when requests that may generate ``remaining`` [n] tokens more
    generate ``counts`` [n] of these, or one each, which is then at least left."""
    if counts is None:
        return int(np.count_nonzero(remaining <= _CLIP_MAX_NEW_TOKENS))
    return int((np.minimum(remaining, _CLIP_MAX_NEW_TOKENS) - np.minimum(remaining - counts,
                                                                         _CLIP_MAX_NEW_TOKENS)).sum())


class NewTokenRatio:
    """Reserves ``ratio`` of the remaining output of all running requests and the one to be admitted.

    ``conservativeness`` scales the initial and the minimum ratio; 0 reserves nothing at any time. The ratio never
    exceeds 1.
    """

    def __init__(self, conservativeness: float):
        self._init = min(1.0, _INIT_RATIO * conservativeness)
        self.ratio = self._init

    def __repr__(self) -> str:
        return f"NewTokenRatio({self.ratio:.3f})"

    def decay(self) -> None:
        """Lower the ratio after a decode step without a retraction."""
        self.ratio = max(self.ratio - _DECAY_PER_STEP, self._init * _MIN_RATIO_FACTOR)

    def on_retraction(self, running: Iterable[Req]) -> None:
        """Raise the ratio to what the requests that are still ``running`` have used so far, as pages ran out."""
        if not self._init:
            return
        used = total = 0
        for req in running:
            used += req.num_output_tokens + _RETRACT_DECODE_STEPS
            total += req.sampling.max_new_tokens
        self.ratio = min(1.0, max(self.ratio, used / (total + 1)))

    def reserved_tokens(self, remaining: int) -> int:
        """Tokens to leave free for requests whose ``remaining_output`` sums up to ``remaining``."""
        return int(self.ratio * remaining)
