"""Shards: the parts of a checkpoint's projections that a linear layer's weight consists of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..weights.slots import Slot


@dataclass(frozen=True)
class Shard:
    """A rank's part of the projection ``name``, a matrix of ``shape`` (outputs, inputs): rows ``[offset, offset +
    size)`` of the layer's weight are the slice that begins at ``start`` along ``dim``."""

    name: str
    offset: int
    size: int
    shape: tuple[int, int]
    dim: int
    start: int

    def rows_of(self, weight: torch.Tensor) -> torch.Tensor:
        return weight[self.offset:self.offset + self.size]

    def slot(self, weight: torch.Tensor) -> Slot:
        """Returns the slot that copies the projection's weight into its rows of ``weight``."""
        return Slot(f"{self.name}.weight", self.rows_of(weight), self.shape, self.dim, self.start)
