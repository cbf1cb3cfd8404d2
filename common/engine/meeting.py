"""Where data-parallel attention ranks agree, once a turn of the loop, on what they compute together in it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..distributed.parallel import Parallel


@dataclass(frozen=True)
class Turn:
    """What the attention groups compute in one turn, each entry a group's: ``tokens`` rows of the model's layers, and
    ``scored`` rows of its head. A group without work takes part with one row that nobody reads."""

    tokens: list[int]
    scored: list[int]

    @staticmethod
    def of_one_row_each(size: int) -> Turn:
        """What is computed before there are requests."""
        return Turn([1] * size, [1] * size)


class Meeting:
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

    def agree(self, tokens: int, scored: int) -> Turn | None:
        """``tokens`` and ``scored`` are this rank's rows, 0 where it has no batch; None where nobody has one."""
        told = self._parallel.across.gather_ints(np.array([tokens, scored, self._wish_ms]))
        if not told[:, 0].any():
            self._wait_ms = int(told[:, 2].min())
            return None
        self._wait_ms = 0
        return Turn(np.maximum(told[:, 0], 1).tolist(), told[:, 1].tolist())
