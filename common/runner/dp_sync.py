"""Where data-parallel attention ranks agree, once a turn of the loop, on what they compute together in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..distributed.parallel import Parallel


@dataclass(frozen=True)
class DPStepInfo:
    """What the attention groups compute in one turn, each entry a group's: ``tokens`` rows of the model's layers, and
    ``scored`` rows of its head. A group without work takes part with rows that nobody reads, one or as many as others.

    ``steady``: every group decodes or has no work, so that all may replay a graph. ``size``: all do, each the one that
    was captured for so many rows. ``fewest``: where all with work compute prompts, tokens of the one with the fewest.
    """

    tokens: list[int]
    scored: list[int]
    steady: bool = False
    size: int | None = None
    fewest: int = 0

    @staticmethod
    def of_rows_each(groups: int, rows: int) -> DPStepInfo:
        """Equal parts: what graphs compute."""
        return DPStepInfo([rows] * groups, [rows] * groups, steady=True)

    def replayed(self, size_for: Callable[[int], int | None]) -> DPStepInfo:
        """The turn as graphs of one size compute it where all groups can replay one, else itself: what one group
        exchanges, all do.

        ``size_for`` names the captured size that so many rows run at, None where they are too many.
        """
        size = size_for(max(self.tokens)) if self.steady else None
        return self if size is None else replace(DPStepInfo.of_rows_each(len(self.tokens), size), size=size)


class DPSync:
    """One rank's. All ranks of the engine call ``agree`` exactly once a turn, between two ticks."""

    def __init__(self, parallel: Parallel):
        self._parallel = parallel
        self._wish_ms = 0
        self._wait_ms = 0

    @property
    def dp_rank(self) -> int:
        return self._parallel.dp_rank

    def wish(self, wait_ms: int) -> None:
        """How long this rank would wait for messages after a turn in which nothing is computed."""
        self._wish_ms = wait_ms

    @property
    def wait_ms(self) -> int:
        """What all ranks agreed to wait: nothing where one computed, else the shortest wish."""
        return self._wait_ms

    def agree(self, tokens: int, scored: int, *, decodes: bool) -> DPStepInfo | None:
        """``tokens`` and ``scored`` are this rank's rows, 0 where it has no batch; None where nobody has one.
        ``decodes``: a graph could compute this rank's batch."""
        told = self._parallel.across.gather_ints(np.array([tokens, scored, self._wish_ms, decodes or not tokens]))
        if not told[:, 0].any():
            self._wait_ms = int(told[:, 2].min())
            return None
        self._wait_ms = 0
        working = told[told[:, 0] > 0]
        fewest = 0 if working[:, 3].any() else int(working[:, 0].min())
        return DPStepInfo(np.maximum(told[:, 0], 1).tolist(), told[:, 1].tolist(), bool(told[:, 3].all()),
                          fewest=fewest)
