"""Grouped matrix products: multiplies each row with the matrix of its expert.

A program takes one block of ``moe_align``'s rows, all of one expert, and some columns. The gate and up products of a
gated MLP run in one program, so that its activation needs no pass of its own.
"""

from __future__ import annotations

import torch

from .._triton import pdl, start_next, tl, triton, wait_for_last
from ..gated_activation import gate_times
from ..tuning.moe import Tile
from .moe_align import Alignment

SCALE_GROUP = 128


@triton.jit(do_not_specialize=["total", "num_blocks", "scale_columns", "scale_depth", "choices"])
def _moe_gemm_kernel(a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, bias_ptr, out_ptr, rows_ptr, expert_of_block_ptr, total,
                     num_blocks, columns, depth, a_stride, b_stride, scale_columns, scale_depth, choices,
                     GATED: tl.constexpr, LIMIT: tl.constexpr, BLOCK_SCALED: tl.constexpr,
                     ROW_SCALED: tl.constexpr, INT8: tl.constexpr, WHOLE: tl.constexpr, GROUP: tl.constexpr,
                     BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr,
                     BAND: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    # Programs go through a band of row blocks before the next columns, so that an expert's matrix stays in the cache.
    program = tl.program_id(0)
    column_blocks = tl.cdiv(columns, BLOCK_COLUMNS)
    first = program // (BAND * column_blocks) * BAND
    height = tl.minimum(num_blocks - first, BAND)
    within = program % (BAND * column_blocks)
    block = first + within % height
    expert = tl.load(expert_of_block_ptr + block).to(tl.int64)
    if expert < 0:
        return
    choice = tl.load(rows_ptr + block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    present = choice < total
    row = tl.where(present, choice, 0) // choices
    column = within // height * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column_in = column < columns
    safe = tl.where(column_in, column, 0).to(tl.int64)
    inner = tl.arange(0, BLOCK_DEPTH)
    a_at = a_ptr + row[:, None] * a_stride + inner[None, :]
    b_at = b_ptr + expert * b_stride + safe[None, :] * depth + inner[:, None]
    up_at = b_at + columns * depth
    if BLOCK_SCALED:
        a_scale_at = a_scale_ptr + row * scale_depth
        b_scale_at = b_scale_ptr + (expert * scale_columns + safe // GROUP) * scale_depth
        up_scale_at = b_scale_ptr + (expert * scale_columns + (columns + safe) // GROUP) * scale_depth
    acc = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.int32 if INT8 else tl.float32)
    up = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.int32 if INT8 else tl.float32)
    for start in range(0, depth, BLOCK_DEPTH):
        if WHOLE:
            a = tl.load(a_at)
            b = tl.load(b_at)
        else:
            inside = start + inner < depth
            a = tl.load(a_at, inside[None, :], other=0.0)
            b = tl.load(b_at, inside[:, None], other=0.0)
        if BLOCK_SCALED:
            step = start // GROUP
            a_scale = tl.load(a_scale_at + step)[:, None]
            acc += tl.dot(a, b) * (a_scale * tl.load(b_scale_at + step)[None, :])
        else:
            acc = tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)
        if GATED:
            if WHOLE:
                c = tl.load(up_at)
            else:
                c = tl.load(up_at, inside[:, None], other=0.0)
            if BLOCK_SCALED:
                up += tl.dot(a, c) * (a_scale * tl.load(up_scale_at + step)[None, :])
            else:
                up = tl.dot(a, c, up, input_precision="ieee", out_dtype=up.dtype)
            up_at += BLOCK_DEPTH
        a_at += BLOCK_DEPTH
        b_at += BLOCK_DEPTH
    acc = acc.to(tl.float32)
    up = up.to(tl.float32)
    if ROW_SCALED:
        row_scale = tl.load(a_scale_ptr + row)[:, None]
        b_scale_at = b_scale_ptr + expert * scale_columns + safe
        acc *= row_scale * tl.load(b_scale_at)[None, :]
        if GATED:
            up *= row_scale * tl.load(b_scale_at + columns)[None, :]
    if bias_ptr is not None:
        bias_at = bias_ptr + (expert * 2 if GATED else expert) * columns + safe
        acc += tl.load(bias_at).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(bias_at + columns).to(tl.float32)[None, :]
    if GATED:
        acc = gate_times(acc, up, LIMIT)
    out_at = out_ptr + choice[:, None] * columns + column[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), present[:, None] & column_in[None, :])


def moe_gemm(a: torch.Tensor, b: torch.Tensor, aligned: Alignment, choices: int, total: int, tile: Tile,
             dtype: torch.dtype, *, gated: bool = False, a_scale: torch.Tensor | None = None,
             b_scale: torch.Tensor | None = None,
             bias: torch.Tensor | None = None, limit: float = 0.0) -> torch.Tensor:
    """``[total, N]`` in ``dtype``: row c is ``a[c // choices]`` times its expert's matrix, transposed; rows that
    ``aligned`` leaves out are not written.

    ``a`` [., depth], contiguous in depth; ``b`` [S, N, depth], contiguous. ``gated``: ``b`` [S, 2 * N, depth], and the
    result is ``silu`` of the gates' product times the ups', with a ``limit`` ``gated_activation.clamped_gate``.
    ``bias`` [S, N], or [S, 2 * N], is added before that.
    With float8 or int8 ``a`` and ``b`` come float32 scales, int8's by row: ``a_scale`` [., ceil(depth / 128)] and
    ``b_scale`` [S, ceil(N / 128), ceil(depth / 128)], or [., 1] and [S, N].
    """
    columns, depth = b.shape[1] // (2 if gated else 1), b.shape[2]
    sizes = [0, 0] if b_scale is None else list(b_scale.shape[1:])  # one size is row scales', two are block scales'
    by_block, by_row = b_scale is not None and len(sizes) == 2, len(sizes) == 1
    assert a.stride(-1) == 1 and b.is_contiguous() and aligned.block == tile.rows
    assert b_scale is None or (a_scale is not None and a_scale.is_contiguous() and b_scale.is_contiguous())
    out = torch.empty((total, columns), dtype=dtype, device=a.device)
    num_blocks = aligned.expert_of_block.shape[0]
    deep = SCALE_GROUP if by_block else tile.depth
    if num_blocks:
        _moe_gemm_kernel[(num_blocks * triton.cdiv(columns, tile.columns),)](
            a, a_scale, b, b_scale, bias, out, aligned.sorted_choices, aligned.expert_of_block, total, num_blocks,
            columns, depth, a.stride(0), b.stride(0), sizes[0], sizes[-1], choices, GATED=gated, LIMIT=limit,
            BLOCK_SCALED=by_block, ROW_SCALED=by_row, INT8=a.dtype == torch.int8, WHOLE=depth % deep == 0,
            GROUP=SCALE_GROUP, BLOCK_ROWS=tile.rows, BLOCK_COLUMNS=tile.columns, BLOCK_DEPTH=deep, BAND=tile.band,
            num_warps=tile.warps, num_stages=tile.stages, **pdl(a))
    return out
