"""A sum, over ranks or of a product, that is left to who needs it, who may do more in the same pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...kernels.gemm.dense_matmul import dense_matmul, matmul_rmsnorm
from .all_to_all import DeferredCombine
from .tp import TPGroup


@dataclass(frozen=True)
class DeferredSum:
    """The sum of ``part`` [T, hidden] over the ranks of ``group``. ``part`` is this rank's summand, used up when
    the sum is made: once, at the same place of the program on every rank."""

    part: torch.Tensor
    group: TPGroup

    def total(self) -> torch.Tensor:
        """``[T, hidden]``, equal on all ranks."""
        return self.group.all_reduce(self.part) if len(self.part) else self.part

    def rows(self, index: torch.Tensor) -> DeferredSum:
        """Of these rows alone."""
        return DeferredSum(self.part[index], self.group)

    @property
    def norms(self) -> bool:
        """Whether one kernel makes the sum and its norm."""
        return self.group.peers is not None and self.group.peers.takes_rows(self.part)

    def normed(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(total + residual) * weight, total + residual)``, of a sum that ``norms``."""
        assert self.group.peers is not None
        return self.group.peers.sum_normed(self.part, residual, weight, eps)


@dataclass(frozen=True)
class DeferredRows:
    """This rank's rows of the sum of ``part + more`` [ranks * n, hidden] over the ranks of ``group``; else as
    DeferredSum."""

    part: torch.Tensor
    more: torch.Tensor | None
    group: TPGroup

    def total(self) -> torch.Tensor:
        """``[n, hidden]``"""
        return self.group.reduce_scatter_rows(self.part if self.more is None else self.part + self.more)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return self.total()[index]

    norms = True

    def normed(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(total + residual) * weight, total + residual)``"""
        assert self.group.peers is not None
        return self.group.peers.scatter_normed(self.part, self.more, residual, weight, eps)


@dataclass(frozen=True)
class DeferredProduct:
    """``factor @ weight.T`` [T, hidden], on one rank: where a residual waits for it, it is added as it is made."""

    factor: torch.Tensor
    weight: torch.Tensor

    def total(self) -> torch.Tensor:
        return dense_matmul(self.factor, self.weight)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        return dense_matmul(self.factor[index], self.weight)

    norms = True

    def normed(self, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(total + residual) * weight, total + residual)``; ``residual`` is used up."""
        return matmul_rmsnorm(residual, self.factor, self.weight, weight, eps)


Summed = torch.Tensor | DeferredSum | DeferredRows | DeferredProduct | DeferredCombine
"""Rows of hidden states, or the sum that they are."""
