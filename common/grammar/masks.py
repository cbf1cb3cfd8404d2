"""Masks of all constrained rows of a step, filled in parallel."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import xgrammar

from .matcher import Matcher

FillRow = Callable[[torch.Tensor, int], None]
"""See engine/choosing.py, FillAllowed."""

# A batch that takes longer has a row to find: for some steps each row is filled alone, and pays for itself.
_SLOW_SECONDS = 0.05
_STEPS_ALONE = 8


class MaskFiller:
    """Threads of rank 0 that fill masks: of a 128k vocabulary one row takes 0.1 to 0.5 ms inside a string."""

    def __init__(self, vocab_size: int):
        self._vocab_size = vocab_size
        # xgrammar may set the bits behind the last token's.
        self._last_word = np.uint32((1 << (vocab_size - 1) % 32 + 1) - 1)
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=max(1, min(8, (os.cpu_count() or 1) // 2)))
        self._alone = 0  # steps that are still to be filled row by row

    def fill(self, matchers: Sequence[Matcher]) -> list[FillRow]:
        """One a matcher, which has taken in all tokens of its request."""
        words = np.zeros((len(matchers), -(self._vocab_size // -32)), np.int32)
        live = [(i, matcher.grammar) for i, matcher in enumerate(matchers)
                if matcher.grammar is not None and matcher.error is None]
        if len(live) == 1 or (live and self._alone):
            self._alone = max(0, self._alone - 1)
            for i, _ in live:
                matchers[i].fill(words, i)
        elif live and not self._fill_together(live, words):
            for i, _ in live:
                matchers[i].fill(words, i)
        for matcher, row in zip(matchers, words.view(np.uint32)):
            row[-1] &= self._last_word
            matcher.finish_mask(row)
        return [_copier(torch.from_numpy(row)) for row in words]

    def _fill_together(self, live: list[tuple[int, xgrammar.GrammarMatcher]], words: np.ndarray) -> bool:
        """False where a grammar among them could not be asked: which, only asking each alone tells."""
        began = time.perf_counter()
        try:
            self._batch.batch_fill_next_token_bitmask([grammar for _, grammar in live], words, [i for i, _ in live])
        except RuntimeError:
            return False
        if time.perf_counter() - began > _SLOW_SECONDS:
            self._alone = _STEPS_ALONE
        return True


def _copier(words: torch.Tensor) -> FillRow:
    def fill(bitmask: torch.Tensor, row: int) -> None:
        bitmask[row] = words

    return fill
