"""Product with a weight of the rows' own type: our kernel for few rows, cuBLAS for many."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from .skinny_matmul import skinny_matmul
from .skinny_tiles import most_rows


def dense_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
                 dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x`` [T, in] ``@ weight`` [out, in] ``.T + bias``: ``[T, out]``, rounded to the type of ``x`` and then held in
    ``dtype``, which is that type without it."""
    if len(x) <= most_rows(weight) and x.stride(-1) == 1:
        return skinny_matmul(x, weight, bias, dtype=dtype)
    y = linear(x, weight, bias)
    return y if dtype is None else y.to(dtype)
