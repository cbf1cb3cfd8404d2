"""Multiplies each head's rows with its own matrix, for decode steps: with few rows, their time is that of reading.

A programmatic launch may read weights before the previous kernel has ended. A program takes a block of one head's
columns in their whole depth.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..gemm.dense_matmul import dense_matmul
from ..tuning.policy import policy_of

_BLOCK_VALUES = 16384
"""Values of the matrix that one program reads: 32 KiB."""


@triton.jit(do_not_specialize=["rows"])
def _per_head_matmul_kernel(x_ptr, w_ptr, y_ptr, rows, x_stride_t, x_stride_h, w_stride_h, w_stride_k, w_stride_n,
                            heads, DEPTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
                            BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inner = tl.arange(0, BLOCK_DEPTH)
    w = tl.load(w_ptr + head * w_stride_h + inner[:, None] * w_stride_k + column[None, :] * w_stride_n,
                (inner < DEPTH)[:, None] & (column < COLUMNS)[None, :], other=0.0)
    wait_for_last(PDL)
    row = tl.program_id(2) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    x = tl.load(x_ptr + row[:, None].to(tl.int64) * x_stride_t + head * x_stride_h + inner[None, :],
                (row < rows)[:, None] & (inner < DEPTH)[None, :], other=0.0)
    y = tl.dot(x, w, input_precision="ieee")
    at = (row[:, None].to(tl.int64) * heads + head) * COLUMNS + column[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), (row < rows)[:, None] & (column < COLUMNS)[None, :])


def per_head_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``[T, H, K]``, contiguous in its last dimension, times ``[H, K, N]`` of any strides: ``[T, H, N]``. Neither is
    empty; the kernel is for 16-bit types, and torch multiplies others."""
    rows, heads, depth = x.shape
    columns = w.shape[2]
    block_depth = max(16, triton.next_power_of_2(depth)) if runs_triton(x) else 0
    block_rows = policy_of(x.device).attention.per_head_rows(rows)
    if runs_triton(x) and x.element_size() > 2 and policy_of(x.device).batch_invariant:
        return torch.stack([dense_matmul(x[:, head], w[head].T) for head in range(heads)], 1)
    if not runs_triton(x) or block_rows is None or x.element_size() != 2 or block_depth > 1024:
        return reference.per_head_matmul(x, w)
    y = torch.empty((rows, heads, columns), dtype=x.dtype, device=x.device)
    block_columns = max(16, min(_BLOCK_VALUES // block_depth, triton.next_power_of_2(columns)))
    _per_head_matmul_kernel[(heads, triton.cdiv(columns, block_columns), triton.cdiv(rows, block_rows))](
        x, w, y, rows, x.stride(0), x.stride(1), w.stride(0), w.stride(1), w.stride(2), heads, DEPTH=depth,
        COLUMNS=columns, BLOCK_ROWS=block_rows, BLOCK_COLUMNS=block_columns, BLOCK_DEPTH=block_depth, num_warps=4,
        **pdl(x))
    return y
