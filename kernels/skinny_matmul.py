"""Product of few rows with a weight, at the speed of memory: each weight is read once, by programs on every
multiprocessor.

Weights may be float8 with a scale an output or a block; they become the rows' type in registers, so that rows need not
be made float8 first, and lose nothing.

Before it waits for the kernel that makes its rows, a program asks for its first weights to be brought to the level-2
cache: that kernel writes none of them, and what hides its end and this one's start is a fetch from memory.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from . import reference
from ._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from .skinny_tiles import SkinnyTile, tile_for


@triton.jit
def _row_scale(x_scale_ptr, row, row_in, x_scale_row, scale_ptr, column, scale_step):
    return (tl.load(x_scale_ptr + tl.where(row_in, row, 0) * x_scale_row)[:, None]
            * tl.load(scale_ptr + column * scale_step)[None, :])


# ``rows`` changes with every step: specialized on 1 and on multiples of 16 it would compile while requests wait.
@triton.jit(do_not_specialize=["rows", "pieces"])
def _skinny_matmul_kernel(x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, part_ptr, count_ptr, rows, out, width,
                          x_stride, x_scale_row, x_scale_step, scale_step, pieces, SCALES: tl.constexpr,
                          BIAS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
                          DEPTH: tl.constexpr, JOINS: tl.constexpr, AHEAD: tl.constexpr, SPLIT: tl.constexpr,
                          BULK: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr,
                          ROUNDED: tl.constexpr):
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    inner = tl.arange(0, DEPTH)
    column_in = column < out
    row_in = row < rows
    # Columns beyond the last read the first one's weights, which are not stored: loads need no mask.
    safe = tl.where(column_in, column, 0).to(tl.int64)
    steps = tl.cdiv(width, DEPTH)
    each = tl.cdiv(steps, pieces)
    first = piece * each
    last = tl.minimum(first + each, steps)
    start_next(PDL)
    if PDL and AHEAD > 0:
        SPAN: tl.constexpr = AHEAD // SPLIT
        begin = first * DEPTH + tl.arange(0, SPLIT) * SPAN
        begin = tl.where(begin + SPAN <= width, begin, 0)
        tl.inline_asm_elementwise(BULK, "=r,l", [(w_ptr + safe[:, None] * width + begin[None, :]).to(tl.int64)],
                                  dtype=tl.int32, is_pure=False, pack=1)
    wait_for_last(PDL)
    w_at = w_ptr + safe[:, None] * width + first * DEPTH + inner[None, :]
    x_at = x_ptr + row[:, None].to(tl.int64) * x_stride + first * DEPTH + inner[None, :]
    if SCALES == "block":
        scale_at = scale_ptr + (safe // scale_step) * steps
        x_scale_at = x_scale_ptr + tl.where(row_in, row, 0) * x_scale_row
    if FORM == "sums":
        sums = tl.zeros((COLUMNS, DEPTH), tl.float32)
    elif FORM == "weights first":
        sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.range(first, last, num_stages=STAGES):
        if WHOLE:
            w = tl.load(w_at)
            x = tl.load(x_at, row_in[:, None], other=0.0)
        else:
            present = inner < width - step * DEPTH
            w = tl.load(w_at, present[None, :], other=0.0)
            x = tl.load(x_at, row_in[:, None] & present[None, :], other=0.0)
        if FORM == "sums":
            product = w.to(tl.float32) * tl.sum(x.to(tl.float32), 0)[None, :]
        elif FORM == "weights first":
            product = tl.dot(w, tl.trans(x), None if SCALES == "block" else sums, input_precision="ieee")
        else:
            product = tl.dot(x, tl.trans(w), None if SCALES == "block" else sums, input_precision="ieee")
        if SCALES == "block":
            scale = tl.load(scale_at + step)
            x_scale = tl.load(x_scale_at + step * x_scale_step)
            if FORM == "rows first":
                product *= x_scale[:, None] * scale[None, :]
            else:
                product *= scale[:, None] * x_scale[None, :]
        if SCALES == "block" or FORM == "sums":
            sums += product
        else:
            sums = product
        w_at += DEPTH
        x_at += DEPTH
    if FORM == "sums":
        acc = tl.sum(sums, 1)[None, :]
    elif FORM == "weights first":
        acc = tl.trans(sums)
    else:
        acc = sums
    stored = row_in[:, None] & column_in[None, :]
    y_at = row[:, None].to(tl.int64) * out + column[None, :]
    if JOINS:
        # The program that comes last adds up what all have left, in the order of the pieces: no race decides a sum.
        tl.store(part_ptr + piece.to(tl.int64) * rows * out + y_at, acc, stored)
        tl.debug_barrier()
        if tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == pieces - 1:
            tl.store(count_ptr + tile, 0)
            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for other in range(pieces):
                total += tl.load(part_ptr + other * rows * out + y_at, stored, other=0.0, cache_modifier=".cg")
            if SCALES == "row":
                total *= _row_scale(x_scale_ptr, row, row_in, x_scale_row, scale_ptr, safe, scale_step)
            if BIAS:
                total += tl.load(bias_ptr + safe)[None, :].to(tl.float32)
            tl.store(y_ptr + y_at, total.to(ROUNDED).to(y_ptr.dtype.element_ty), stored)
    else:
        if SCALES == "row":
            acc *= _row_scale(x_scale_ptr, row, row_in, x_scale_row, scale_ptr, safe, scale_step)
        if BIAS:
            acc += tl.load(bias_ptr + safe)[None, :].to(tl.float32)
        tl.store(y_ptr + y_at, acc.to(ROUNDED).to(y_ptr.dtype.element_ty), stored)


_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def skinny_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
                  x_scale: torch.Tensor | None = None, scale: torch.Tensor | None = None,
                  block: tuple[int, int] | None = None, rounded: torch.dtype | None = None,
                  dtype: torch.dtype | None = None, tile: SkinnyTile | None = None) -> torch.Tensor:
    if not runs_triton(x):
        return reference.skinny_matmul(x, weight, bias, scale=scale, block=block, dtype=dtype)
    rows, width = x.shape
    out = weight.shape[0]
    rounded = rounded or x.dtype
    y = torch.empty((rows, out), dtype=dtype or rounded, device=x.device)
    if not rows:
        return y
    if tile is None:
        tile = tile_for(out, width, weight.dtype)
    assert x.stride(1) == 1 and (block is None or block[1] == tile.depth == 128)
    parts = torch.empty((tile.pieces, rows, out), dtype=torch.float32, device=x.device) if tile.pieces > 1 else y
    scales = "none" if scale is None else "block" if block else "row"
    scale_step = block[0] if block else 0 if scale is None or scale.numel() == 1 else 1
    x_steps = (0, 0) if x_scale is None or x_scale.numel() == 1 else x_scale.stride()
    split = max(1, 32 * tile.warps // tile.columns)
    span = tile.ahead * weight.itemsize // split
    _skinny_matmul_kernel[(triton.cdiv(out, tile.columns), tile.pieces)](
        x, x if x_scale is None else x_scale, weight, weight if scale is None else scale,
        weight if bias is None else bias, y, parts, _counts(x.device),
        rows, out, width, x.stride(0), *x_steps, scale_step, tile.pieces, SCALES=scales, BIAS=bias is not None,
        WHOLE=width % tile.depth == 0, ROWS=max(16, triton.next_power_of_2(rows)) if tile.form != "sums" else 1,
        COLUMNS=tile.columns, DEPTH=tile.depth, JOINS=tile.pieces > 1, AHEAD=tile.ahead, SPLIT=split,
        BULK=f"cp.async.bulk.prefetch.L2.global [$1], {span}; mov.u32 $0, 0;",
        FORM=tile.form, STAGES=tile.stages, ROUNDED=_DTYPES[rounded], num_warps=tile.warps, num_stages=tile.stages,
        **pdl(x))
    return y


@lru_cache
def _counts(device: torch.device) -> torch.Tensor:
    """How many of a tile's pieces are there: zeros between launches, which the last piece leaves."""
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)
