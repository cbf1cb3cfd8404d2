"""Product of few rows with a weight, at the speed of memory: each weight is read once, by programs on every
multiprocessor.

Before it waits for the kernel that makes its rows, a program asks for its first weights to be brought to the level-2
cache. No kernel ahead writes them, and a fetch reads nothing: what it brings is as new as memory.

A product of gates beside ups may end in the activation: a tile then takes each gate's column with its up's beside it.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..rowwise.silu_and_mul import silu_times
from .persistent_tiles import PersistentTile, streamed_tile, streams
from .small_m_tiles import SmallMTile, tile_for
from .split_k_reduce import counts_of, last_piece


@triton.jit
def _fetch(w_ptr, column, width, begin, FETCH: tl.constexpr, SPLIT: tl.constexpr, SPAN: tl.constexpr):
    """Ask for ``SPLIT`` spans of each column's weights from ``begin`` on, an instruction a span."""
    at = begin + tl.arange(0, SPLIT) * SPAN
    at = tl.where(at + SPAN <= width, at, 0)
    tl.inline_asm_elementwise(FETCH, "=r,l", [(w_ptr + column[:, None] * width + at[None, :]).to(tl.int64)],
                              dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _columns(tile, out, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """``(a tile's columns, whether each is there, the weight's row of each)``; GATED, every second column is an up's.

    Columns beyond the last read the first one's weights, which are not stored: loads need no mask.
    """
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < out
    row = column // 2 + (column % 2) * (out // 2) if GATED else column
    return column, inside, tl.where(inside, row, 0).to(tl.int64)


@triton.jit
def _gated(values, ROWS: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """``[ROWS, PAIRS]`` of ``[ROWS, 2 * PAIRS]`` values, rounded to DTYPE first: so a kernel behind would find them."""
    gate, up = tl.split(tl.reshape(values.to(DTYPE), (ROWS, PAIRS, 2)))
    return silu_times(gate.to(tl.float32), up.to(tl.float32))


@triton.jit(do_not_specialize=["biased"])
def _one_row_matmul_kernel(x_ptr, w_ptr, bias_ptr, y_ptr, out, width, biased, WHOLE: tl.constexpr,
                           COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
                           FETCH: tl.constexpr, SPLIT: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr):
    tile = tl.program_id(0)
    column, column_in, safe = _columns(tile, out, COLUMNS, GATED)
    start_next(PDL)
    if PDL and SPAN > 0:
        _fetch(w_ptr, safe, width, 0, FETCH, SPLIT, SPAN)
    wait_for_last(PDL)
    inner = tl.arange(0, DEPTH)
    w_at = w_ptr + safe[:, None] * width + inner[None, :]
    sums = tl.zeros((COLUMNS, DEPTH), tl.float32)
    for step in tl.range(0, tl.cdiv(width, DEPTH), num_stages=STAGES):
        present = inner < width - step * DEPTH
        if WHOLE:
            w = tl.load(w_at)
            x = tl.load(x_ptr + step * DEPTH + inner)
        else:
            w = tl.load(w_at, present[None, :], other=0.0)
            x = tl.load(x_ptr + step * DEPTH + inner, present, other=0.0)
        sums += w.to(tl.float32) * x.to(tl.float32)[None, :]
        w_at += DEPTH
    y = tl.sum(sums, 1) + tl.load(bias_ptr + safe, column_in & (biased != 0), other=0.0).to(tl.float32)
    if GATED:
        gated = _gated(y[None, :], 1, COLUMNS // 2, y_ptr.dtype.element_ty)
        pair = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        tl.store(y_ptr + pair[None, :], gated.to(y_ptr.dtype.element_ty), (pair < out // 2)[None, :])
    else:
        tl.store(y_ptr + column, y.to(y_ptr.dtype.element_ty), column_in)


# ``rows`` changes with every step: specialized on 1 and on multiples of 16 it would compile while requests wait.
@triton.jit(do_not_specialize=["rows", "x_scale_step", "pieces", "biased"])
def _skinny_matmul_kernel(x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, part_ptr, count_ptr, rows, out, width,
                          x_stride, x_scale_step, scale_step, pieces, biased, SCALED: tl.constexpr,
                          WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                          JOINS: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, FETCH: tl.constexpr,
                          SPLIT: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr):
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.arange(0, ROWS)
    row_in = row < rows
    column, column_in, safe = _columns(tile, out, COLUMNS, GATED)
    steps = tl.cdiv(width, DEPTH)
    each = tl.cdiv(steps, pieces)
    first = piece * each
    start_next(PDL)
    if PDL and SPAN > 0:
        _fetch(w_ptr, safe, width, first * DEPTH, FETCH, SPLIT, SPAN)
    wait_for_last(PDL)
    inner = tl.arange(0, DEPTH)
    w_at = w_ptr + safe[:, None] * width + first * DEPTH + inner[None, :]
    x_at = x_ptr + row[:, None].to(tl.int64) * x_stride + first * DEPTH + inner[None, :]
    # Weights come first: they fill the tensor cores' tall side, which few rows would leave empty.
    sums = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in tl.range(first, tl.minimum(first + each, steps), num_stages=STAGES):
        present = inner < width - step * DEPTH
        if WHOLE:
            w = tl.load(w_at)
            x = tl.load(x_at, row_in[:, None], other=0.0)
        else:
            w = tl.load(w_at, present[None, :], other=0.0)
            x = tl.load(x_at, row_in[:, None] & present[None, :], other=0.0)
        sums = tl.dot(w, tl.trans(x), sums, input_precision="ieee")
        w_at += DEPTH
        x_at += DEPTH
    acc = tl.trans(sums)
    stored = row_in[:, None] & column_in[None, :]
    place = row[:, None].to(tl.int64) * out + column[None, :]
    last = True
    if JOINS:
        last, acc = last_piece(acc, part_ptr, count_ptr, tile, piece, pieces, tl.cast(rows, tl.int64) * out, place,
                               stored)
    if last:
        if SCALED:
            acc *= tl.load(x_scale_ptr + tl.where(row_in, row, 0) * x_scale_step)[:, None]
            acc *= tl.load(scale_ptr + safe * scale_step)[None, :]
        acc += tl.load(bias_ptr + safe, column_in & (biased != 0), other=0.0).to(tl.float32)[None, :]
        if GATED:
            gated = _gated(acc, ROWS, COLUMNS // 2, y_ptr.dtype.element_ty)
            pair = tile * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
            tl.store(y_ptr + row[:, None].to(tl.int64) * (out // 2) + pair[None, :],
                     gated.to(y_ptr.dtype.element_ty), row_in[:, None] & (pair < out // 2)[None, :])
        else:
            tl.store(y_ptr + place, acc.to(y_ptr.dtype.element_ty), stored)


def skinny_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
                  x_scale: torch.Tensor | None = None, scale: torch.Tensor | None = None,
                  dtype: torch.dtype | None = None, tile: SmallMTile | PersistentTile | None = None,
                  gated: bool = False) -> torch.Tensor:
    """``x @ weight.T + bias``: ``[T, out]`` in ``dtype`` (that of ``x`` without it), summed in float32; or
    ``silu_and_mul`` of that, ``[T, out / 2]``, where it is ``gated``.

    ``x`` [T, in] is contiguous in its last dimension, ``weight`` [out, in] contiguous and of the same type, ``bias``
    [out]. Where both are float8, ``x_scale`` float32 [T, 1] or [1] and ``scale`` float32 [out] or [1] are their scales.
    """
    if not runs_triton(x):
        y = reference.skinny_matmul(x, weight, bias, x_scale=x_scale, scale=scale, dtype=dtype)
        return reference.silu_and_mul(y) if gated else y
    (rows, width), out = x.shape, weight.shape[0]
    y = torch.empty((rows, out // 2 if gated else out), dtype=dtype or x.dtype, device=x.device)
    if not rows:
        return y
    if tile is None and scale is None and x.is_contiguous() and streams(weight):
        tile = streamed_tile(rows, out, width)
    if tile is None:
        tile = tile_for(rows, out, width, weight.dtype)
    assert x.stride(1) == 1 and x.dtype == weight.dtype
    if isinstance(tile, PersistentTile):
        from .persistent_matmul import streamed_matmul  # not there without Triton

        return streamed_matmul(x, weight, bias, tile, gated)
    columns = triton.cdiv(out, tile.columns)
    split = max(1, 32 * tile.warps // tile.columns)
    bytes_each = tile.ahead // tile.columns // split
    if weight.itemsize * width % 16 or bytes_each > weight.itemsize * width:
        bytes_each = 0  # a fetch begins at a multiple of 16 bytes, and keeps within its row
    assert bytes_each % 16 == 0
    options = {
        "WHOLE": width % tile.depth == 0, "COLUMNS": tile.columns, "DEPTH": tile.depth, "STAGES": tile.stages,
        "GATED": gated, "FETCH": f"cp.async.bulk.prefetch.L2.global [$1], {bytes_each}; mov.u32 $0, 0;",
        "SPLIT": split, "SPAN": bytes_each // weight.itemsize, "num_warps": tile.warps, "num_stages": tile.stages,
        **pdl(x)}
    biases = y if bias is None else bias
    if rows == 1 and scale is None and tile.pieces == 1 and tile.columns <= 16:
        _one_row_matmul_kernel[(columns,)](x, weight, biases, y, out, width, int(bias is not None), **options)
        return y
    parts = torch.empty((tile.pieces, rows, out), dtype=torch.float32, device=x.device) if tile.pieces > 1 else y
    _skinny_matmul_kernel[(columns, tile.pieces)](
        x, x if x_scale is None else x_scale, weight, weight if scale is None else scale, biases, y, parts,
        counts_of(x.device), rows, out, width, x.stride(0), int(x_scale is not None and x_scale.numel() > 1),
        int(scale is not None and scale.numel() > 1), tile.pieces, int(bias is not None),
        SCALED=scale is not None, ROWS=max(16, triton.next_power_of_2(rows)), JOINS=tile.pieces > 1, **options)
    return y
