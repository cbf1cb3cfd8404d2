"""The exchange of decode steps: rows meet in one kernel and part in another, each with the norm beside it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .deferred_reduce import DeferredRows
from .tp import TPGroup

log = logging.getLogger("baton.engine")


@dataclass(frozen=True)
class GatheredTokens:
    """The rows [ranks * n, hidden] of all attention groups, for what all ranks compute."""

    rows: torch.Tensor


class LowLatencyExchange:
    """Of ranks that are an attention group each. TokenExchange says what a step has; ``takes`` says whether it goes
    this way, by what is equal on all ranks. A sentence in the log tells of decode steps that cannot.

    ``live`` [ranks * n] is 0 for rows that only pad the groups' batches to one size; None: all are tokens.
    """

    def __init__(self, across: TPGroup):
        self._across = across
        self._rows = 0  # of each rank in a step that goes this way; 0: none does
        self._told = False
        self.live: torch.Tensor | None = None

    def begin(self, counts: Sequence[int]) -> None:
        """A decode step of so many rows of each group, or (of none) another step."""
        self._rows = counts[0] if len(set(counts)) == 1 else 0
        self.live = None

    def mark(self, live: torch.Tensor | None) -> None:
        """Which of this rank's rows [n] of the step are tokens, before its first layer; on all ranks or none."""
        self.live = None
        if live is not None and self._rows:
            self.live = self._across.all_gather_rows(live.to(torch.float16))

    def takes(self, rows: torch.Tensor) -> bool:
        """Whether the norm of ``rows`` [n, hidden] goes this way."""
        if not self._rows or len(rows) != self._rows:
            return False
        peers = self._across.peers
        if peers is not None and peers.meets(rows):
            return True
        if not self._told:
            self._told = True
            log.warning("Decode steps of %d rows reach experts over %s: %s.", len(rows),
                        "NCCL" if self._across.device_group is not None else "gloo",
                        "the ranks cannot write into each other's memory"
                        if peers is None else f"rows of {rows.shape[1]} values of {rows.dtype} do not fit the slots")
        return False

    def normed(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
               eps: float) -> tuple[GatheredTokens, torch.Tensor]:
        """``(norm(x + residual) * weight`` of all groups, this one's ``x + residual)``."""
        assert self._across.peers is not None
        rows, total = self._across.peers.gather_normed(x, residual, weight, eps)
        return GatheredTokens(rows), total

    def parted(self, part: torch.Tensor) -> DeferredRows:
        """This rank's rows of the sum of the ranks' ``part`` [ranks * n, hidden]."""
        return DeferredRows(part, None, self._across)

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's part [n, ...] of what has met, a view."""
        return rows.chunk(self._across.size)[self._across.rank]
