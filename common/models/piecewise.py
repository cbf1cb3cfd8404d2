"""A step in pieces: what layers compute row by row is recorded for a number of rows, attention between it is not."""

from __future__ import annotations

from typing import Protocol

import torch

Projected = tuple[torch.Tensor, ...]
"""What a layer's attention is given, a row of each tensor for a row of the step."""


class PiecewiseStep(Protocol):
    """Of one step, whose layers come in their order. Results of attention that are left in ``heads`` [T, width] need
    not be brought there."""

    heads: torch.Tensor

    def before(self, index: int, x: torch.Tensor) -> tuple[Projected, torch.Tensor]:
        """``CausalLM.between`` of the step's rows ``x``, its second result being kept from piece to piece. What is
        returned holds until the next call."""
