"""Fills the token masks of all constrained rows of a step, in parallel."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .backend import FillTogether, GrammarState
from .matcher import Matcher

FillRow = Callable[[torch.Tensor, int], None]
"""See ``request.sampling_metadata.FillAllowed``."""

_SLOW_BATCH_SECONDS = 0.05
"""A batch that takes longer has a slow row: for ``_STEPS_ROW_BY_ROW`` steps each row is filled alone and charged its
own time."""
_STEPS_ROW_BY_ROW = 8


class MaskFiller:
    """Fills masks in threads of rank 0: one row of a 128k vocabulary takes 0.1 to 0.5 ms inside a string."""

    def __init__(self, vocab_size: int, fill_together: Callable[[int], FillTogether]):
        """``fill_together`` is that of a ``GrammarBackend``."""
        self._vocab_size = vocab_size
        # a library may set the bits after the last token's.
        self._last_word = np.uint32((1 << (vocab_size - 1) % 32 + 1) - 1)
        self._batch = fill_together(max(1, min(8, (os.cpu_count() or 1) // 2)))
        self._steps_row_by_row = 0  # that are left

    def fill(self, matchers: Sequence[Matcher]) -> list[FillRow | None]:
        """Fills a mask for each matcher, which has accepted all tokens of its request, and moved to some of its drafts;
        returns copiers of them, None where nothing can follow these drafts."""
        words = np.zeros((len(matchers), -(self._vocab_size // -32)), np.int32)
        live = [(i, matcher.grammar) for i, matcher in enumerate(matchers)
                if matcher.grammar is not None and matcher.error is None]
        if len(live) == 1 or (live and self._steps_row_by_row):
            self._steps_row_by_row = max(0, self._steps_row_by_row - 1)
            for i, _ in live:
                matchers[i].fill(words, i)
        elif live and not self._fill_together(live, words):
            for i, _ in live:
                matchers[i].fill(words, i)
        words.view(np.uint32)[:, -1] &= self._last_word
        finished = [matcher.finish_mask(row) for matcher, row in zip(matchers, words.view(np.uint32))]
        return [_copier(torch.from_numpy(row)) if done else None for row, done in zip(words, finished)]

    def _fill_together(self, live: list[tuple[int, GrammarState]], words: np.ndarray) -> bool:
        """Fills the masks as a batch; returns False where one grammar failed: which one, only filling row by row shows.
        """
        began = time.perf_counter()
        try:
            self._batch([grammar for _, grammar in live], words, [i for i, _ in live])
        except RuntimeError:
            return False
        if time.perf_counter() - began > _SLOW_BATCH_SECONDS:
            self._steps_row_by_row = _STEPS_ROW_BY_ROW
        return True


def _copier(words: torch.Tensor) -> FillRow:
    def fill(bitmask: torch.Tensor, row: int) -> None:
        bitmask[row] = words

    return fill
