"""Prompt lookup: the longest n-gram at the end that has occurred before is followed by what followed it then.

The method is Saxena's (https://github.com/apoorvumang/prompt-lookup-decoding, 2023); it needs no draft model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..api.drafts import Drafts
from ..config.server.speculative import SPECULATIVE_ALGORITHMS, SpeculativeArgs
from ..request.req import Req
from .base import Algorithm


class NgramProposer:
    """Looks n-grams of ``min_window`` to ``max_window`` tokens up in prompt and output."""

    def __init__(self, args: SpeculativeArgs):
        self._min_window = args.speculative_ngram_min_match_window_size
        self._max_window = args.speculative_ngram_max_match_window_size

    def propose(self, reqs: Sequence[Req], limits: Sequence[int]) -> list[Drafts | None]:
        found = [continuation(req.tokens.view(), self._min_window, self._max_window, limit)
                 for req, limit in zip(reqs, limits)]
        return [Drafts(tuple(tokens)) if tokens else None for tokens in found]

    def on_verified(self, req: Req, drafts: Drafts, num_accepted: int) -> None:
        """Does nothing: the tokens themselves are the only state."""

    def on_end(self, reqs: Sequence[Req]) -> None:
        """Does nothing."""


def continuation(tokens: np.ndarray, min_window: int, max_window: int, limit: int) -> list[int]:
    """Returns up to ``limit`` tokens that followed the longest suffix of ``tokens`` [n] that occurs before; none where
    that is shorter than ``min_window``. Of several occurrences it is the last one that ``limit`` tokens follow."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    length = min(len(ends), 1)
    while length and length < max_window:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    if length < min_window or limit <= 0:
        return []
    followed = ends[ends + limit <= last]
    start = int(followed[-1] if len(followed) else ends[0]) + 1
    found: list[int] = tokens[start:start + limit].tolist()
    return found


SPECULATIVE_ALGORITHMS.register("NGRAM")(Algorithm(make_proposer=NgramProposer))
