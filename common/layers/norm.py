"""Root-mean-square norm as a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...kernels.arguments import Float8Format
from ...kernels.rowwise.fp8_rmsnorm import fp8_rmsnorm
from ...kernels.rowwise.rmsnorm import rmsnorm
from ..distributed.deferred_reduce import Summed
from ..distributed.token_exchange import TokenExchange
from ..weights.slots import Allocate, Slot

FormOf = Callable[[int], Float8Format | None]
"""How so many rows are wanted; None: in the engine's type."""


def as_they_are(rows: int) -> Float8Format | None:
    return None


class RMSNorm:
    def __init__(self, name: str, size: int, eps: float, allocate: Allocate, tokens: TokenExchange | None = None):
        """``tokens``: behind it the rows of all attention groups meet."""
        self.name = name
        self._meeting = None if tokens is None else tokens.decode
        self.eps = eps
        self.weight = allocate(size)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Over the last dimension of ``[T, size]`` or ``[T, heads, size]``."""
        return rmsnorm(x, self.weight, self.eps)[0]

    def add(self, x: Summed, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; without a residual ``x`` begins it. A pending sum is made here."""
        normed, total = self.add_for(as_they_are, x, residual)
        assert isinstance(normed, torch.Tensor)
        return normed, total

    def add_for(self, wanted: FormOf, x: Summed, residual: torch.Tensor | None) -> tuple[Any, torch.Tensor]:
        """The same, its first result Rows as they are ``wanted`` where the norm's kernel can make them so; with
        ``tokens``, in a decode step that these have a quicker way for, Met."""
        if self._meeting is not None and residual is not None and self._meeting.takes(residual):
            assert isinstance(x, torch.Tensor), "a rank that is an attention group has its rows whole"
            return self._meeting.normed(x, residual, self.weight, self.eps)
        if not isinstance(x, torch.Tensor):
            if residual is not None and x.norms:
                return x.normed(residual, self.weight, self.eps)
            x = x.total()
        form = wanted(len(x))
        if form is not None:
            return fp8_rmsnorm(x, self.weight, self.eps, form, residual)
        return rmsnorm(x, self.weight, self.eps, residual)

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.name}.weight", self.weight, tuple(self.weight.shape))
