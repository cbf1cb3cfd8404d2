"""Twin of weights of four bits that index a table."""

from __future__ import annotations

import torch

NF4_BLOCK = 64
_FP4 = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
NF4_TABLES = {
    "nf4": (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    "fp4": (*_FP4, *(-value for value in _FP4))}
"""The values by their four bits."""


def dequantize_nf4(packed: torch.Tensor, absmax: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Twin of ``nf4.dequantize_nf4.dequantize_nf4``."""
    table = torch.tensor(NF4_TABLES[kind], device=packed.device)
    values = table[torch.stack((packed >> 4, packed & 15), -1).flatten(1).int()].unflatten(1, (-1, NF4_BLOCK))
    return (values * absmax[..., None]).flatten(1).to(dtype)
