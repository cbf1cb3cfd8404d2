"""Rows of a table and other rows, normed and side by side: the input of a draft layer.

Apart, an embedding, two norms and a concatenation are four launches of a few kilobytes each in every pass of a drafter.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..arguments import NormWeight
from .rmsnorm import normed


@triton.jit
def _joined_norms_kernel(first_ptr, row_ptr, second_ptr, y_ptr, first_weight_ptr, second_weight_ptr, first_eps,
                         second_eps, first_stride, second_stride, width, GATHERS: tl.constexpr,
                         FIRST_NORM: tl.constexpr, SECOND_NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    start_next(PDL)
    wait_for_last(PDL)
    if half == 0:
        source = row
        if GATHERS:
            source = tl.load(row_ptr + row)
        x = tl.load(first_ptr + source * first_stride + columns, inside, other=0.0)
        if FIRST_NORM:
            x = normed(x, tl.load(first_weight_ptr + columns, inside, other=0.0), first_eps, width)
        tl.store(y_ptr + 2 * row * width + columns, x, inside)
    else:
        x = tl.load(second_ptr + row * second_stride + columns, inside, other=0.0)
        if SECOND_NORM:
            x = normed(x, tl.load(second_weight_ptr + columns, inside, other=0.0), second_eps, width)
        tl.store(y_ptr + (2 * row + 1) * width + columns, x, inside)


def joined_norms(first: torch.Tensor, second: torch.Tensor, first_norm: NormWeight | None,
                 second_norm: NormWeight | None, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ``[T, 2 * width]``: rows of ``first`` [R, width], then those of ``second`` [T, width], each contiguous,
    after their norms where given. Row t has ``first[rows[t]]`` ([T] int64, all within it), without ``rows`` row t."""
    if not runs_triton(second):
        return reference.joined_norms(first, second, first_norm, second_norm, rows)
    count, width = second.shape
    y = torch.empty((count, 2 * width), dtype=second.dtype, device=second.device)
    if count:
        block = triton.next_power_of_2(width)
        none = NormWeight(second, 0.0)
        one, other = first_norm or none, second_norm or none
        _joined_norms_kernel[(count, 2)](
            first, second if rows is None else rows, second, y, one.weight, other.weight, one.eps, other.eps,
            first.stride(0), second.stride(0), width, GATHERS=rows is not None, FIRST_NORM=first_norm is not None,
            SECOND_NORM=second_norm is not None, BLOCK=block, num_warps=max(1, min(16, block // 512)), **pdl(second))
    return y
