"""Sums, over ranks or of a product, that are deferred to the consumer, which may fuse more into the same kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.gemm.dense_matmul import dense_matmul, matmul_rmsnorm
from .all_to_all import DeferredCombine
from .tp import TPGroup


@dataclass(frozen=True)
class DeferredSum:
    """A deferred all-reduce: the sum of ``part`` [T, hidden] over the ranks of ``group``.

    ``part`` is this rank's summand and is overwritten when the sum is computed, which every rank does once, at the same
    point of the program.
    """

    part: torch.Tensor
    group: TPGroup

    def reduce(self) -> torch.Tensor:
        """Returns the sum ``[T, hidden]``, equal on all ranks."""
        return self.group.all_reduce(self.part) if len(self.part) else self.part

    def select(self, index: torch.Tensor) -> DeferredSum:
        """Returns the deferred sum of these rows."""
        return DeferredSum(self.part[index], self.group)

    @property
    def fuses_norm(self) -> bool:
        """True if one kernel computes the sum and its norm."""
        return self.group.symm_comm is not None and self.group.symm_comm.can_all_reduce_norm(self.part)

    def add_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(norm(sum + residual) * weight, sum + residual)``; needs ``fuses_norm``."""
        assert self.group.symm_comm is not None
        return self.group.symm_comm.all_reduce_norm(self.part, residual, weight, eps)


@dataclass(frozen=True)
class DeferredRows:
    """A deferred reduce-scatter: this rank's rows of the sum of ``part + addend`` [ranks * n, hidden] over the ranks of
    ``group``. See DeferredSum."""

    part: torch.Tensor
    addend: torch.Tensor | None
    group: TPGroup

    def reduce(self) -> torch.Tensor:
        """Returns this rank's rows ``[n, hidden]``."""
        return self.group.reduce_scatter_rows(self.part if self.addend is None else self.part + self.addend)

    def select(self, index: torch.Tensor) -> torch.Tensor:
        return self.reduce()[index]

    fuses_norm = True

    def add_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(norm(sum + residual) * weight, sum + residual)``."""
        assert self.group.symm_comm is not None
        return self.group.symm_comm.reduce_scatter_norm(self.part, self.addend, residual, weight, eps)


@dataclass(frozen=True)
class DeferredProduct:
    """A deferred product ``x @ weight.T`` [T, hidden] on one rank: its kernel adds to the residual directly."""

    x: torch.Tensor
    weight: torch.Tensor

    def reduce(self) -> torch.Tensor:
        return dense_matmul(self.x, self.weight)

    def select(self, index: torch.Tensor) -> torch.Tensor:
        return dense_matmul(self.x[index], self.weight)

    fuses_norm = True

    def add_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(norm(sum + residual) * weight, sum + residual)``; overwrites ``residual``."""
        return matmul_rmsnorm(residual, self.x, self.weight, weight, eps)


MaybeDeferred = torch.Tensor | DeferredSum | DeferredRows | DeferredProduct | DeferredCombine
"""Rows of hidden states, or the deferred sum that yields them."""
