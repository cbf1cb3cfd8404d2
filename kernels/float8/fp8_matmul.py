"""Multiplies two float8 matrices with a scale for each row, or with DeepSeek-V3's block scales.

Those (arXiv:2412.19437, 3.3.2) are one for 128 x 128 weights and one for 128 values of a row: each step of 128 along
the inner dimension is accumulated by the tensor cores and then added, scaled, to float32 registers, which also makes up
for their short accumulators.
"""

from __future__ import annotations

import torch

from .._triton import pdl, start_next, tl, triton, wait_for_last
from ..arguments import By
from ..gemm.split_k_reduce import last_split_sum, split_counters
from ..tuning.policy import policy_of
from ..tuning.split_tile import SplitTile

GROUP = 128
_BAND = 16


@triton.jit
def _block_of_program(program, row_blocks, column_blocks, BAND: tl.constexpr):
    """``(row block, column block)``: a band of rows before the next columns, so that weights are read once a band."""
    band = program // (BAND * column_blocks)
    height = tl.minimum(row_blocks - band * BAND, BAND)
    offset = program % (BAND * column_blocks)
    return band * BAND + offset % height, offset // height


# ``rows`` changes with every step: specialized on 1 and on multiples of 16 it would compile while requests wait.
@triton.jit(do_not_specialize=["rows", "splits", "x_row", "x_group", "w_step"])
def _fp8_matmul_kernel(x_desc, w_desc, x_scale_ptr, w_scale_ptr, y_ptr, partial_ptr, counter_ptr, rows, out, steps,
                       splits, x_row, x_group, w_step, BY_BLOCK: tl.constexpr, ONE_SCALE: tl.constexpr,
                       INT8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                       BAND: tl.constexpr, REDUCES: tl.constexpr, PDL: tl.constexpr):
    program = tl.program_id(0)
    split = tl.program_id(1)
    row_block, column_block = _block_of_program(program, tl.cdiv(rows, ROWS), tl.cdiv(out, COLUMNS), BAND)
    first_row = row_block * ROWS
    first_column = column_block * COLUMNS
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    # Beyond the last row and column the tensor maps give zeros, and scales are those of the last.
    safe_row = tl.minimum(row, rows - 1).to(tl.int64)
    safe_column = tl.minimum(column, out - 1)
    each = tl.cdiv(steps, splits)
    first = split * each
    last = tl.minimum(first + each, steps)
    start_next(PDL)
    wait_for_last(PDL)
    acc = tl.zeros((ROWS, COLUMNS), tl.int32 if INT8 else tl.float32)
    if BY_BLOCK:
        x_scale_at = x_scale_ptr + safe_row * x_row
        for step in range(first, last):
            x = x_desc.load([first_row, step * DEPTH])
            w = w_desc.load([first_column, step * DEPTH])
            scale = tl.load(x_scale_at + step * x_group.to(tl.int64))
            if ONE_SCALE:
                scale *= tl.load(w_scale_ptr + first_column // w_step * steps + step)
                acc += tl.dot(x, tl.trans(w)) * scale[:, None]
            else:
                w_scale = tl.load(w_scale_ptr + safe_column // w_step * steps + step)
                acc += tl.dot(x, tl.trans(w)) * scale[:, None] * w_scale[None, :]
    else:
        for step in range(first, last):
            x = x_desc.load([first_row, step * DEPTH])
            w = w_desc.load([first_column, step * DEPTH])
            acc = tl.dot(x, tl.trans(w), acc, out_dtype=acc.dtype)
    acc = acc.to(tl.float32)
    inside = (row < rows)[:, None] & (column < out)[None, :]
    offset = row.to(tl.int64)[:, None] * out + column[None, :]
    is_last = True
    if REDUCES:
        is_last, acc = last_split_sum(acc, partial_ptr, counter_ptr, program, split, splits,
                                      tl.cast(rows, tl.int64) * out, offset, inside)
    if is_last:
        if not BY_BLOCK:
            acc *= tl.load(x_scale_ptr + safe_row * x_row)[:, None]
            acc *= tl.load(w_scale_ptr + safe_column * w_step)[None, :]
        tl.store(y_ptr + offset, acc.to(y_ptr.dtype.element_ty), inside)


def fp8_matmul(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, by: By,
               dtype: torch.dtype, *, tall: int = GROUP, tile: SplitTile | None = None) -> torch.Tensor:
    """``[T, out]`` in ``dtype`` of ``x`` [T, in] and ``weight`` [out, in], float8 or int8 and contiguous, where ``in``
    is a multiple of 16. Scales are float32: by row ``x_scale`` [T, 1] or [1] and ``weight_scale`` [out] or [1]; by
    block ``x_scale`` [T, ceil(in / 128)], of any strides, and contiguous ``weight_scale`` [ceil(out / tall), ceil(in /
    128)].
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    (rows, width), out = x.shape, weight.shape[0]
    y = torch.empty((rows, out), dtype=dtype, device=x.device)
    if not rows:
        return y
    if tile is None:
        tile = policy_of(x.device).float8.tile(by, rows, out, width)
    by_block = by == "block"
    assert tile.depth == GROUP or not by_block
    if by_block:
        x_row, x_group, w_step = *x_scale.stride(), tall
    else:
        x_row, x_group, w_step = int(x_scale.numel() > 1), 0, int(weight_scale.numel() > 1)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(out, tile.columns)
    partials = torch.empty((tile.splits, rows, out), dtype=torch.float32, device=x.device) if tile.splits > 1 else y
    _fp8_matmul_kernel[(tiles, tile.splits)](
        TensorDescriptor.from_tensor(x, [tile.rows, tile.depth]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]), x_scale, weight_scale, y, partials,
        split_counters(x.device), rows, out, triton.cdiv(width, tile.depth), tile.splits, x_row, x_group, w_step,
        BY_BLOCK=by_block, ONE_SCALE=by_block and tall % tile.columns == 0, INT8=x.dtype == torch.int8, ROWS=tile.rows,
        COLUMNS=tile.columns, DEPTH=tile.depth, BAND=_BAND, REDUCES=tile.splits > 1, num_warps=tile.warps,
        num_stages=tile.stages, **pdl(x))
    return y
