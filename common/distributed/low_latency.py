"""Low-latency exchange of decode steps: one kernel norms and gathers the rows of all ranks, another reduces, scatters
and norms them."""

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
    """The gathered rows [ranks * n, hidden] of all attention groups, for what all ranks compute."""

    rows: torch.Tensor


class LowLatencyExchange:
    """Exchange between attention groups of one rank each. ``begin_step`` describes a step; ``can_gather`` says whether
    it takes this path, by what is equal on all ranks. A warning is logged where decode steps cannot.

    ``live`` [ranks * n] is 0 for rows that only pad the groups' batches to one size; None: all are tokens.
    """

    def __init__(self, dp: TPGroup):
        self._dp = dp
        self._rows = 0  # rows of each rank in a step that takes this path; 0: the step does not
        self._warned = False
        self.live: torch.Tensor | None = None

    def begin_step(self, counts: Sequence[int]) -> None:
        """Announces a decode step with these rows of each group, or (empty) a step of another kind."""
        self._rows = counts[0] if len(set(counts)) == 1 else 0
        self.live = None

    def mark_live(self, live: torch.Tensor | None) -> None:
        """Sets which of this rank's rows [n] of the step are tokens, before its first layer; on all ranks or none."""
        self.live = None
        if live is not None and self._rows:
            self.live = self._dp.all_gather_rows(live.to(torch.float16))

    def can_gather(self, rows: torch.Tensor) -> bool:
        """Returns whether the norm of ``rows`` [n, hidden] gathers them."""
        if not self._rows or len(rows) != self._rows:
            return False
        comm = self._dp.symm_comm
        if comm is not None and comm.can_norm_gather(rows):
            return True
        if not self._warned:
            self._warned = True
            log.warning("Decode steps of %d rows reach experts over %s: %s.", len(rows),
                        "NCCL" if self._dp.device_group is not None else "gloo",
                        "the ranks cannot write into each other's memory"
                        if comm is None else f"rows of {rows.shape[1]} values of {rows.dtype} do not fit the slots")
        return False

    def norm_gather(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
                    eps: float) -> tuple[GatheredTokens, torch.Tensor]:
        """Returns ``norm(x + residual) * weight`` of all groups, and this group's ``x + residual``."""
        assert self._dp.symm_comm is not None
        rows, total = self._dp.symm_comm.norm_gather(x, residual, weight, eps)
        return GatheredTokens(rows), total

    def reduce_scatter_deferred(self, part: torch.Tensor) -> DeferredRows:
        """Returns this rank's rows of the sum of the ranks' ``part`` [ranks * n, hidden], deferred to the norm."""
        return DeferredRows(part, None, self._dp)

    def local_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns this rank's rows [n, ...] of gathered ones, a view."""
        return rows.chunk(self._dp.size)[self._dp.rank]
