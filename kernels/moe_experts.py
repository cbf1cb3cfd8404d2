"""The gated MLPs of a mixture of experts."""

from __future__ import annotations

import torch

from . import reference


def moe_experts(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, places: torch.Tensor,
                weights: torch.Tensor) -> torch.Tensor:
    """``sum over k of weights[t, k] * down[p] (silu(gate[p] x[t]) * up[p] x[t])`` with ``p = places[t, k]``.

    ``x`` [T, H]; ``gate_up`` [S, 2 * I, H], each expert's gate before its up; ``down`` [S, H, I]; ``places`` [T, K]
    int64, of which those outside of ``[0, S)`` add nothing; ``weights`` [T, K] float32. A token names a place once.
    """
    return reference.moe_experts(x, gate_up, down, places, weights)
