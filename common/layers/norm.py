"""Root-mean-square norm as a layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...kernels.rmsnorm import rmsnorm
from ..distributed.pending import PendingSum, Summed
from ..weights.slots import Allocate, Slot


class RMSNorm:
    def __init__(self, name: str, size: int, eps: float, allocate: Allocate):
        self.name = name
        self.eps = eps
        self.weight = allocate(size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension of ``[T, size]`` or ``[T, heads, size]``."""
        return rmsnorm(x, self.weight, self.eps)[0]

    def add(self, x: Summed, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; without a residual ``x`` begins it. A pending sum is made here."""
        if isinstance(x, PendingSum):
            if residual is not None:
                return x.normed(residual, self.weight, self.eps)
            x = x.total()
        return rmsnorm(x, self.weight, self.eps, residual)

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.name}.weight", self.weight, tuple(self.weight.shape))
