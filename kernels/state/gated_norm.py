"""The gated root-mean-square norm behind layers with recurrent states."""

from __future__ import annotations

import torch

from ..reference import state as reference


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *,
               gates_first: bool = False) -> torch.Tensor:
    """``rmsnorm(x) * weight * silu(gate)`` over the last dimension, with ``gates_first`` ``rmsnorm(x * silu(gate)) *
    weight``; in the type of ``gate``. ``x`` and ``gate`` [T, parts, width], ``weight`` [width] or [parts, width]."""
    return reference.gated_norm(x, gate, weight, eps, gates_first)
