"""Multiplies any number of rows with a weight by one tile: a row's sums have the same order whatever the batch.

A program sums up a tile's whole inner dimension, step by step; rows share nothing but the weights. (The method of
"Defeating Nondeterminism in LLM Inference", Thinking Machines, 2025.)
"""

from __future__ import annotations

import torch

from .._triton import pdl, start_next, tl, triton, wait_for_last
from ..tuning.gemm import InvariantTile


@triton.jit(do_not_specialize=["rows", "biased"])
def _batch_invariant_matmul_kernel(x_ptr, w_ptr, bias_ptr, y_ptr, rows, out, width, x_stride, biased,
                                   ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    row_blocks = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % row_blocks * ROWS + tl.arange(0, ROWS)  # neighbours read the same weights
    column = tl.program_id(0) // row_blocks * COLUMNS + tl.arange(0, COLUMNS)
    row_in, column_in = row < rows, column < out
    inner = tl.arange(0, DEPTH)
    x_at = x_ptr + row[:, None].to(tl.int64) * x_stride + inner[None, :]
    w_at = w_ptr + column[:, None].to(tl.int64) * width + inner[None, :]
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(tl.cdiv(width, DEPTH)):
        present = inner < width - step * DEPTH
        x = tl.load(x_at, row_in[:, None] & present[None, :], other=0.0)
        w = tl.load(w_at, column_in[:, None] & present[None, :], other=0.0)
        sums = tl.dot(x, tl.trans(w), sums, input_precision="ieee")
        x_at += DEPTH
        w_at += DEPTH
    sums += tl.load(bias_ptr + column, column_in & (biased != 0), other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + row[:, None].to(tl.int64) * out + column[None, :], sums.to(y_ptr.dtype.element_ty),
             row_in[:, None] & column_in[None, :])


def batch_invariant_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                           tile: InvariantTile) -> torch.Tensor:
    """``x @ weight.T + bias``: ``[T, out]`` in their type, summed in float32. ``x`` [T, in] is contiguous in its last
    dimension, ``weight`` [out, in] contiguous, ``bias`` [out]."""
    (rows, width), out = x.shape, weight.shape[0]
    assert x.stride(1) == 1 and x.dtype == weight.dtype and weight.is_contiguous()
    y = torch.empty((rows, out), dtype=x.dtype, device=x.device)
    if rows:
        _batch_invariant_matmul_kernel[(triton.cdiv(rows, tile.rows) * triton.cdiv(out, tile.columns),)](
            x, weight, y if bias is None else bias, y, rows, out, width, x.stride(0), int(bias is not None),
            ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
            **pdl(x))
    return y
