"""Which part of a checkpoint's projection a linear layer's weight holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..weights.slots import Slot


@dataclass(frozen=True)
class Shard:
    """Rows ``[first, first + size)`` of the layer's own weight are the slice that begins at ``start`` along ``dim`` of
    the projection ``name``, a matrix of ``shape`` (outputs, inputs)."""

    name: str
    first: int
    size: int
    shape: tuple[int, int]
    dim: int
    start: int

    def rows_of(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[self.first:self.first + self.size]

    def slot(self, weight: torch.Tensor) -> Slot:
        """Where the projection's weight goes: into its rows of ``weight``, as it is."""
        return Slot(f"{self.name}.weight", self.rows_of(weight), self.shape, self.dim, self.start)
