"""Multiplies few rows (small M) with a weight at the speed of memory: programs on every SM read each weight once.

Before it waits for the kernel that makes its rows, a program prefetches its first weights into the L2 cache. No earlier
kernel writes them, and a prefetch reads nothing: what it brings is as new as memory.

A product of gates and ups may end in the activation: a tile then interleaves each gate's column with its up's.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..rowwise.silu_and_mul import silu_times
from ..tuning.gemm import PersistentTile, SmallMTile
from ..tuning.policy import policy_of
from .split_k_reduce import last_split_sum, split_counters


@triton.jit
def _fetch(w_ptr, column, width, begin, FETCH: tl.constexpr, SPANS: tl.constexpr, SPAN_VALUES: tl.constexpr):
    """Prefetch ``SPANS`` spans of each column's weights from ``begin`` on, an instruction a span."""
    at = begin + tl.arange(0, SPANS) * SPAN_VALUES
    at = tl.where(at + SPAN_VALUES <= width, at, 0)
    tl.inline_asm_elementwise(FETCH, "=r,l", [(w_ptr + column[:, None] * width + at[None, :]).to(tl.int64)],
                              dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _columns(tile, out, COLUMNS: tl.constexpr, GATED: tl.constexpr):
    """``(a tile's columns, which of them exist, the weight's row of each)``; GATED, every second column is an up's.

    Columns beyond the last read the first one's weights, which are not stored: loads need no mask.
    """
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < out
    row = column // 2 + (column % 2) * (out // 2) if GATED else column
    return column, inside, tl.where(inside, row, 0).to(tl.int64)


@triton.jit
def _gated(values, ROWS: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr):
    """``[ROWS, PAIRS]`` of ``[ROWS, 2 * PAIRS]`` values, rounded to DTYPE first: a separate kernel would read these."""
    gate, up = tl.split(tl.reshape(values.to(DTYPE), (ROWS, PAIRS, 2)))
    return silu_times(gate.to(tl.float32), up.to(tl.float32))


@triton.jit(do_not_specialize=["biased"])
def _one_row_matmul_kernel(x_ptr, w_ptr, bias_ptr, y_ptr, out, width, biased, WHOLE: tl.constexpr,
                           COLUMNS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
                           FETCH: tl.constexpr, SPANS: tl.constexpr, SPAN_VALUES: tl.constexpr, PDL: tl.constexpr):
    tile = tl.program_id(0)
    column, column_in, safe = _columns(tile, out, COLUMNS, GATED)
    start_next(PDL)
    if PDL and SPAN_VALUES > 0:
        _fetch(w_ptr, safe, width, 0, FETCH, SPANS, SPAN_VALUES)
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
@triton.jit(do_not_specialize=["rows", "x_scale_step", "splits", "biased"])
def _small_m_matmul_kernel(x_ptr, x_scale_ptr, w_ptr, scale_ptr, bias_ptr, y_ptr, partial_ptr, counter_ptr, rows, out,
                           width, x_stride, x_scale_step, scale_step, splits, biased, SCALED: tl.constexpr,
                           WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
                           REDUCES: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, FETCH: tl.constexpr,
                           SPANS: tl.constexpr, SPAN_VALUES: tl.constexpr, PDL: tl.constexpr):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)
    row_in = row < rows
    column, column_in, safe = _columns(tile, out, COLUMNS, GATED)
    steps = tl.cdiv(width, DEPTH)
    each = tl.cdiv(steps, splits)
    first = split * each
    start_next(PDL)
    if PDL and SPAN_VALUES > 0:
        _fetch(w_ptr, safe, width, first * DEPTH, FETCH, SPANS, SPAN_VALUES)
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
    offset = row[:, None].to(tl.int64) * out + column[None, :]
    last = True
    if REDUCES:
        last, acc = last_split_sum(acc, partial_ptr, counter_ptr, tile, split, splits, tl.cast(rows, tl.int64) * out,
                                   offset, stored)
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
            tl.store(y_ptr + offset, acc.to(y_ptr.dtype.element_ty), stored)


def small_m_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
                   x_scale: torch.Tensor | None = None, scale: torch.Tensor | None = None,
                   dtype: torch.dtype | None = None, tile: SmallMTile | PersistentTile | None = None,
                   gated: bool = False) -> torch.Tensor:
    """``x @ weight.T + bias``: ``[T, out]`` in ``dtype`` (that of ``x`` without it), summed in float32; or
    ``silu_and_mul`` of that, ``[T, out / 2]``, where it is ``gated``.

    ``x`` [T, in] is contiguous in its last dimension, ``weight`` [out, in] contiguous and of the same type, ``bias``
    [out]. Where both are float8, ``x_scale`` float32 [T, 1] or [1] and ``scale`` float32 [out] or [1] are their scales.
    ``tile`` replaces the policy's.
    """
    if not runs_triton(x):
        y = reference.small_m_matmul(x, weight, bias, x_scale=x_scale, scale=scale, dtype=dtype)
        return reference.silu_and_mul(y) if gated else y
    (rows, width), out = x.shape, weight.shape[0]
    y = torch.empty((rows, out // 2 if gated else out), dtype=dtype or x.dtype, device=x.device)
    if not rows:
        return y
    policy = policy_of(x.device).gemm
    if tile is None and scale is None and x.is_contiguous() and policy.is_persistent(out, width, weight.itemsize):
        tile = policy.persistent(rows, out, width)
    if tile is None:
        tile = policy.small_m(rows, out, width, weight.dtype)
    assert x.stride(1) == 1 and x.dtype == weight.dtype
    if isinstance(tile, PersistentTile):
        from .persistent_matmul import persistent_matmul  # not there without Triton

        return persistent_matmul(x, weight, bias, tile, gated)
    columns = triton.cdiv(out, tile.columns)
    spans = max(1, 32 * tile.warps // tile.columns)
    bytes_each = tile.prefetch_bytes // tile.columns // spans
    if weight.itemsize * width % 16 or bytes_each > weight.itemsize * width:
        bytes_each = 0  # a prefetch begins at a multiple of 16 bytes, and stays within its row
    assert bytes_each % 16 == 0
    options = {
        "WHOLE": width % tile.depth == 0, "COLUMNS": tile.columns, "DEPTH": tile.depth, "STAGES": tile.stages,
        "GATED": gated, "FETCH": f"cp.async.bulk.prefetch.L2.global [$1], {bytes_each}; mov.u32 $0, 0;",
        "SPANS": spans, "SPAN_VALUES": bytes_each // weight.itemsize, "num_warps": tile.warps,
        "num_stages": tile.stages, **pdl(x)}
    biases = y if bias is None else bias
    if rows == 1 and scale is None and tile.splits == 1 and tile.columns <= 16:
        _one_row_matmul_kernel[(columns,)](x, weight, biases, y, out, width, int(bias is not None), **options)
        return y
    partials = torch.empty((tile.splits, rows, out), dtype=torch.float32, device=x.device) if tile.splits > 1 else y
    _small_m_matmul_kernel[(columns, tile.splits)](
        x, x if x_scale is None else x_scale, weight, weight if scale is None else scale, biases, y, partials,
        split_counters(x.device), rows, out, width, x.stride(0), int(x_scale is not None and x_scale.numel() > 1),
        int(scale is not None and scale.numel() > 1), tile.splits, int(bias is not None),
        SCALED=scale is not None, ROWS=max(16, triton.next_power_of_2(rows)), REDUCES=tile.splits > 1, **options)
    return y
