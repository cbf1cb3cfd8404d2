"""Gated activations between the two products of an MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ._triton import tl, triton
from .elementwise import by_element

GateActivation = Callable[[torch.Tensor], torch.Tensor]
"""Takes gates followed by ups ``[T, 2 * width]``, and returns activated gates times ups ``[T, width]``."""

ALPHA = 1.702
"""Slope of the clamped gate: x * sigmoid(1.702 * x) is close to a GELU (arXiv:1606.08415)."""


@triton.jit
def gate_times(gate, up, LIMIT: tl.constexpr):
    """``silu(gate) * up`` of float32; with a ``LIMIT`` as gpt-oss has it, see ``clamped_gate``."""
    if LIMIT > 0.0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        made = gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    else:
        made = gate / (1.0 + tl.exp(-gate)) * up
    return made


def clamped_gate(x: torch.Tensor, limit: float) -> torch.Tensor:
    """``[T, 2 * width]``, gates followed by ups, to ``g * sigmoid(1.702 g) * (u + 1)`` ``[T, width]``, where g is the
    gate, at most ``limit``, and u is up, between ``-limit`` and ``limit``."""
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * by_element(torch.sigmoid, ALPHA * gate) * (up + 1)).to(x.dtype)
