"""Low-latency exchange of decode steps: one kernel norms and gathers the rows of all ranks, another reduces, scatters
and norms them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from .deferred_reduce import DeferredRows
from .step_rows import StepRows
from .tp import TPGroup

log = logging.getLogger("baton.engine")


@dataclass(frozen=True)
class GatheredTokens:
    """The gathered rows [ranks * n, hidden] of all attention groups, for what all ranks compute."""

    rows: torch.Tensor


class LowLatencyExchange:
    """Exchange between attention groups of one rank each. ``can_gather`` says whether a step takes this path, by what
    is equal on all ranks. A warning is logged where decode steps cannot."""

    def __init__(self, dp: TPGroup):
        self._dp = dp
        self._warned = False

    def gather_live(self, live: torch.Tensor, rows: StepRows) -> torch.Tensor | None:
        """Gathers which of each rank's rows are tokens, this rank's [n] bool, to ``[ranks * n]``; returns None in a
        step of another kind. All ranks call it."""
        return self._dp.all_gather_rows(live.to(torch.float16)) if rows.decode_rows else None

    def can_gather(self, x: torch.Tensor, rows: StepRows) -> bool:
        """Returns whether the norm of ``x`` [n, hidden] gathers them."""
        if not rows.decode_rows or len(x) != rows.decode_rows:
            return False
        comm = self._dp.symm_comm
        if comm is not None and comm.can_norm_gather(x):
            return True
        if not self._warned:
            self._warned = True
            log.warning("Decode steps of %d rows reach experts over %s: %s.", len(x),
                        "NCCL" if self._dp.device_group is not None else "gloo",
                        "the ranks cannot write into each other's memory"
                        if comm is None else f"rows of {x.shape[1]} values of {x.dtype} do not fit the slots")
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
