"""DP sync: data-parallel attention ranks agree once in each loop iteration on the step that they compute together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..distributed.parallel import Parallel


@dataclass(frozen=True)
class DPStepInfo:
    """One step of all attention groups; each list has an entry a group: ``num_tokens`` rows of the model's layers, and
    ``num_logits`` rows of its head. A group without work computes an idle batch, whose results are not read.

    ``all_decode``: every group decodes or is idle, so that all may replay a CUDA graph. ``graph_size``: all do, each
    the graph that was captured for this number of rows. ``min_prefill_tokens``: the fewest tokens of a group with work,
    where all of these prefill; else 0.
    """

    num_tokens: list[int]
    num_logits: list[int]
    all_decode: bool = False
    graph_size: int | None = None
    min_prefill_tokens: int = 0

    @staticmethod
    def uniform_decode(groups: int, rows: int) -> DPStepInfo:
        """Returns a decode step with ``rows`` rows in each group, as CUDA graphs compute it."""
        return DPStepInfo([rows] * groups, [rows] * groups, all_decode=True)

    def padded_to_graph(self, size_for: Callable[[int], int | None]) -> DPStepInfo:
        """Returns the step padded to one graph size where all groups can replay that graph, else the step itself: all
        groups must exchange the same rows.

        ``size_for`` returns the captured size that a number of rows runs at, None where there are too many.
        """
        size = size_for(max(self.num_tokens)) if self.all_decode else None
        return self if size is None else replace(DPStepInfo.uniform_decode(len(self.num_tokens), size), graph_size=size)


class DPSync:
    """One rank's end. All ranks of the engine call ``sync`` exactly once in each loop iteration."""

    def __init__(self, parallel: Parallel):
        self._parallel = parallel
        self._proposed_wait_ms = 0
        self._wait_ms = 0

    @property
    def dp_rank(self) -> int:
        return self._parallel.dp_rank

    def propose_wait(self, wait_ms: int) -> None:
        """Sets how long this rank would wait for messages after an iteration in which no rank computes."""
        self._proposed_wait_ms = wait_ms

    @property
    def wait_ms(self) -> int:
        """Milliseconds that all ranks wait for messages: 0 where one computed, else the shortest proposal."""
        return self._wait_ms

    def sync(self, num_tokens: int, num_logits: int, *, can_decode: bool) -> DPStepInfo | None:
        """Exchanges this rank's rows, 0 without a batch; returns None where no rank has one. ``can_decode``: a decode
        graph could compute this rank's batch."""
        ranks = self._parallel.dp.gather_ints(
            np.array([num_tokens, num_logits, self._proposed_wait_ms, can_decode or not num_tokens]))
        if not ranks[:, 0].any():
            self._wait_ms = int(ranks[:, 2].min())
            return None
        self._wait_ms = 0
        busy = ranks[ranks[:, 0] > 0]
        min_prefill_tokens = 0 if busy[:, 3].any() else int(busy[:, 0].min())
        return DPStepInfo(np.maximum(ranks[:, 0], 1).tolist(), ranks[:, 1].tolist(), bool(ranks[:, 3].all()),
                          min_prefill_tokens=min_prefill_tokens)
