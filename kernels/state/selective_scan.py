"""The selective scan of Mamba-2 (state-space duality, arXiv:2405.21060)."""

from __future__ import annotations

import torch

from ..arguments import Mamba2, StateRuns
from ..reference import state as reference


def selective_scan(mixed: torch.Tensor, step: torch.Tensor, log_decay: torch.Tensor, skip: torch.Tensor,
                   states: torch.Tensor, shape: Mamba2, runs: StateRuns, out: torch.Tensor) -> None:
    """For each token t of a run, from the state S [P, N] of a head: ``S = exp(log_decay[t]) * S + step[t] *
    outer(x[t], B[t])``, ``out[t] = S @ C[t] + skip * x[t]``.

    ``mixed`` [T, groups, channels], contiguous, has the x of a group's heads, its B and its C; ``step`` and
    ``log_decay`` [T, H] float32 of the H = groups * heads heads, ``skip`` [H] float32; ``states`` [pages, groups,
    heads * P * N]; ``out`` [T, H, P].
    """
    reference.selective_scan(mixed, step, log_decay, skip, states, shape, runs, out)
