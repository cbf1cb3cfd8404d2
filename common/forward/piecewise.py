"""Piecewise CUDA graphs, as models see them: what layers compute row by row is captured, attention is not."""

from __future__ import annotations

from typing import Protocol

import torch

Projected = tuple[torch.Tensor, ...]
"""The inputs of a layer's attention, with one row in each tensor for a row of the step."""


class PiecewiseStep(Protocol):
    """The graphs of one step, whose layers run in order. Attention outputs that are written to ``attention_out``
    [T, width] need not be copied there."""

    attention_out: torch.Tensor

    def run(self, index: int, x: torch.Tensor) -> tuple[Projected, torch.Tensor]:
        """Computes ``CausalLM.between_attentions`` of the step's rows ``x``; the residual is kept between calls.
        The results are valid until the next call."""
