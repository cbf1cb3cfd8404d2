"""Multiplies int8 rows with an int8 weight: sums in int32, scales afterwards.

The kernel is that of float8's products (float8/fp8_matmul.py), whose tensor cores take int8 at the same rate.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import reference
from .._triton import runs_triton
from ..arguments import Int8Rows
from ..float8.fp8_matmul import fp8_matmul
from ..tuning.policy import policy_of
from ..tuning.split_tile import SplitTile


def int8_matmul(rows: Int8Rows, weight: torch.Tensor, weight_scale: torch.Tensor,
                sums: torch.Tensor | None = None) -> torch.Tensor:
    """``[T, out]`` in the rows' type of ``rows`` and ``weight`` [out, in] int8, contiguous, with ``weight_scale`` [out]
    float32. ``sums`` [out] float32, needed for rows with a zero point, are those of the dequantized weight's inputs.

    The kernel takes ``in`` that is a multiple of 16.
    """
    if not runs_triton(weight):
        return reference.int8_matmul(rows, weight, weight_scale, sums)
    shifted = rows.shift is not None and sums is not None
    y = fp8_matmul(rows.values, rows.scale, weight, weight_scale, "row", torch.float32 if shifted else rows.dtype,
                   tile=_tile(len(rows.values), weight))
    if rows.shift is not None and sums is not None:
        y -= rows.shift.view(-1, 1) * sums
    return y.to(rows.dtype)


def _tile(rows: int, weight: torch.Tensor) -> SplitTile:
    policy = policy_of(weight.device).float8
    if rows > policy.max_rows:
        return SplitTile(128, 128, 128, 1, 8, 3)
    return policy.tile("row", rows, *weight.shape)


@lru_cache
def compile_tiles(out: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels of all numbers of rows for such a weight, so that no request waits for the compiler."""
    weight = torch.zeros((out, width), dtype=torch.int8, device=device)
    scale = torch.zeros(out, dtype=torch.float32, device=device)
    for rows in (1, 65, policy_of(device).float8.numbers.max_rows + 1):
        values = torch.zeros((rows, width), dtype=torch.int8, device=device)
        int8_matmul(Int8Rows(values, torch.zeros((rows, 1), device=device), None, dtype), weight, scale)
