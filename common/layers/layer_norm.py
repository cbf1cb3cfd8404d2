"""Layer normalization (arXiv:1607.06450) in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..distributed.deferred_reduce import MaybeDeferred
from ..distributed.step_rows import ONE_GROUP, StepRows
from ..weights.slots import Allocate, Slot
from .norm import FormatOf


class LayerNorm:
    """Subtracts the mean of a row, divides by its deviation, and applies weight and bias, where it has them. The
    checkpoint's weights are ``offset`` smaller than those that are applied."""

    def __init__(self, name: str, size: int, eps: float, allocate: Allocate, *, offset: float = 0.0,
                 weight: bool = True, bias: bool = True):
        self.name = name
        self.eps = eps
        self._size = size
        self.weight = allocate(size) if weight else None
        self.bias = allocate(size) if bias else None
        self._offset = offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norms the last dimension of ``[T, size]``."""
        return torch.nn.functional.layer_norm(x, (self._size,), self.weight, self.bias, self.eps)

    def add_norm(self, x: MaybeDeferred, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(norm(x + residual), x + residual)``; without a residual ``x`` becomes it. Computes a deferred sum.
        """
        rows = x if isinstance(x, torch.Tensor) else x.reduce()
        total = rows if residual is None else rows + residual
        return self(total), total

    def add_norm_as(self, format_of: FormatOf, x: MaybeDeferred, residual: torch.Tensor | None,
                    rows: StepRows = ONE_GROUP) -> tuple[Any, torch.Tensor]:
        """``add_norm``: the rows stay in the engine's type, which every linear layer takes."""
        return self.add_norm(x, residual)

    def slots(self) -> Iterator[Slot]:
        shape = (self._size,)
        if self.weight is not None:
            yield Slot(f"{self.name}.weight", self.weight, shape, load=self._load_weight if self._offset else None)
        if self.bias is not None:
            yield Slot(f"{self.name}.bias", self.bias, shape)

    def _load_weight(self, part: torch.Tensor) -> None:
        assert self.weight is not None
        self.weight.copy_(part).add_(self._offset)
