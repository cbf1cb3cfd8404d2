"""Placeholder of a branch that a layer lacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...distributed.deferred_reduce import MaybeDeferred
from ...distributed.step_rows import ONE_GROUP, StepRows
from ...forward.piecewise import Projected
from ...forward.step_context import StepContext
from ...weights.slots import Slot


class NoAttention:
    """Takes the place of a layer's attention: adds nothing to ``hidden_size`` values of a row."""

    width = 0

    def __init__(self, hidden_size: int):
        self.output: Any = _Zeros(hidden_size)

    def activation_format(self, rows: int) -> None:
        return None

    def project(self, x: torch.Tensor) -> Projected:
        return (x[:, :0],)

    def attend(self, projected: Projected, step: StepContext, cos_sin: torch.Tensor | None,
               trimmed: bool) -> torch.Tensor:
        rows = projected[0]
        return rows[step.batch.logits_rows] if trimmed else rows

    def slots(self) -> Iterator[Slot]:
        yield from ()


class _Zeros:
    """An output projection of nothing."""

    def __init__(self, hidden_size: int):
        self._hidden_size = hidden_size

    def forward_deferred(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.new_zeros(len(heads), self._hidden_size)

    def slots(self) -> Iterator[Slot]:
        yield from ()


class NoMLP:
    """Takes the place of a layer's MLP: adds nothing."""

    dispatches_tokens = False
    computes_own_rows = has_partial = True

    def activation_format(self, rows: int) -> None:
        return None

    def __call__(self, x: torch.Tensor, rows: StepRows = ONE_GROUP) -> torch.Tensor:
        return torch.zeros_like(x)

    def forward_deferred(self, x: torch.Tensor, rows: StepRows = ONE_GROUP) -> MaybeDeferred:
        return self(x)

    def partial(self, x: torch.Tensor, rows: StepRows = ONE_GROUP) -> torch.Tensor:
        return self(x)

    def partial_pair(self, x: torch.Tensor, rows: StepRows = ONE_GROUP) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self(x), None

    def slots(self) -> Iterator[Slot]:
        yield from ()
