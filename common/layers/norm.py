"""The RMSNorm layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...kernels.arguments import Float8Format
from ...kernels.rowwise.fp8_rmsnorm import fp8_rmsnorm
from ...kernels.rowwise.rmsnorm import rmsnorm
from ..distributed.deferred_reduce import MaybeDeferred
from ..distributed.step_rows import ONE_GROUP, StepRows
from ..distributed.token_exchange import TokenExchange
from ..weights.slots import Allocate, Slot

FormatOf = Callable[[int], Float8Format | None]
"""Returns the activation format for a number of rows; None: the engine's type."""


def unquantized(rows: int) -> Float8Format | None:
    """Returns None: rows stay in the engine's type."""
    return None


class RMSNorm:
    def __init__(self, name: str, size: int, eps: float, allocate: Allocate, exchange: TokenExchange | None = None, *,
                 offset: float = 0.0):
        """With ``exchange`` the norm gathers the rows of all attention groups in low-latency decode steps. The
        checkpoint's weights are ``offset`` smaller than those that are applied, which are then in float32: in bfloat16
        the sum would lose the lower bits of small weights."""
        self.name = name
        self._low_latency = None if exchange is None else exchange.low_latency
        self.eps = eps
        self.weight = allocate(size, dtype=torch.float32 if offset else None)
        self._offset = offset

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Norms the last dimension of ``[T, size]`` or ``[T, heads, size]``."""
        return rmsnorm(x, self.weight, self.eps)[0]

    def add_norm(self, x: MaybeDeferred, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(norm(x + residual), x + residual)``; without a residual ``x`` becomes it. Computes a deferred sum.
        """
        normed, total = self.add_norm_as(unquantized, x, residual)
        assert isinstance(normed, torch.Tensor)
        return normed, total

    def add_norm_as(self, format_of: FormatOf, x: MaybeDeferred, residual: torch.Tensor | None,
                    rows: StepRows = ONE_GROUP) -> tuple[Any, torch.Tensor]:
        """``add_norm`` with the normed rows in the activation format of ``format_of``, where the norm's kernel can;
        with ``exchange``, in a low-latency decode step of ``rows``, they are GatheredTokens."""
        if self._low_latency is not None and residual is not None and self._low_latency.can_gather(residual, rows):
            assert isinstance(x, torch.Tensor), "a rank that is an attention group has its rows whole"
            return self._low_latency.norm_gather(x, residual, self.weight, self.eps)
        if not isinstance(x, torch.Tensor):
            if residual is not None and x.fuses_norm:
                return x.add_norm(residual, self.weight, self.eps)
            x = x.reduce()
        activation_format = format_of(len(x))
        if activation_format is not None:
            return fp8_rmsnorm(x, self.weight, self.eps, activation_format, residual)
        return rmsnorm(x, self.weight, self.eps, residual)

    def slots(self) -> Iterator[Slot]:
        yield Slot(f"{self.name}.weight", self.weight, tuple(self.weight.shape),
                   load=self._load if self._offset else None)

    def _load(self, part: torch.Tensor) -> None:
        self.weight.copy_(part).add_(self._offset)


class NoNorm:
    """Takes the place of a layer's norm, and returns its rows as they are."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add_norm_as(self, format_of: FormatOf, x: MaybeDeferred, residual: torch.Tensor | None,
                    rows: StepRows = ONE_GROUP) -> tuple[Any, torch.Tensor]:
        return self.add_norm(x, residual)

    def add_norm(self, x: MaybeDeferred, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        total = x if isinstance(x, torch.Tensor) else x.reduce()
        if residual is not None:
            total = total + residual
        return total, total

    def slots(self) -> Iterator[Slot]:
        yield from ()
