"""Multiplies few rows with a large weight on a Hopper GPU by persistent programs that always have loads in flight.

A program stays on its SM. Shared memory is a ring of weights in flight; TMA fills it across the program's tiles. The
ring's first round is issued before the kernel that makes the rows has ended (kernels/_triton.py): while a norm or the
merge of attention's splits runs, which move few bytes, the next 20 MB of weights arrive.

The weight [out, in], contiguous, is read as [out * folds, in / folds] and the rows likewise, so that ``64 / folds``
columns fill the tensor cores' 64 and more programs share the columns. Each part of a column is then multiplied with
each part of a row, and the products of equal parts are summed up.

Written in Gluon, for Triton's pipeline loads rows and weights together. It has no interpreter: small_m_matmul.py's
kernel is the twin on a CPU (tests/gpu/kernels/test_small_m_matmul.py compares).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .. import _triton
from .._gluon import tma_load
from .._triton import start_next, wait_for_last
from ..device import num_sms
from ..rowwise.silu_and_mul import silu_times
from ..tuning.gemm import PersistentTile
from .tma_tiles import tma_descriptor

_LOADING_WARPS = 1


@gluon.jit
def _load_weights(w_desc, bar, w, tile, start, upper, present, BLOCK: gl.constexpr, GATED: gl.constexpr):
    """Loads a step of a tile; of a gated one half are gates, and the others their ups, which begin at ``upper``."""
    if GATED:
        HALF: gl.constexpr = BLOCK // 2
        tma_load(w_desc, [tile * HALF, start], bar, w.slice(0, HALF, 0), present)
        tma_load(w_desc, [upper + tile * HALF, start], bar, w.slice(HALF, HALF, 0), present)
    else:
        tma_load(w_desc, [tile * BLOCK, start], bar, w, present)


@gluon.jit
def _next_step(tile, step, programs, steps):
    step += 1
    return gl.where(step == steps, tile + programs, tile), gl.where(step == steps, 0, step)


@gluon.jit
def _load_all(w_desc, x_desc, ring, tile, programs, steps, total, upper, BLOCK: gl.constexpr, WIDE: gl.constexpr,
              DEPTH: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr):
    """Runs the loading warp."""
    w_ring, x_ring, ready, empty = ring
    BYTES: gl.constexpr = (BLOCK + WIDE) * DEPTH * 2
    at = tile * 0
    for first in gl.static_range(STAGES):
        bar = ready.index(first)
        mbarrier.expect(bar, BYTES, pred=first < total)
        _load_weights(w_desc, bar, w_ring.index(first), tile, at * DEPTH, upper, first < total, BLOCK, GATED)
        tile, at = _next_step(tile, at, programs, steps)
    wait_for_last(PDL)
    for first in gl.static_range(STAGES):
        tma_load(x_desc, [0, first % steps * DEPTH], ready.index(first), x_ring.index(first), first < total)
    for step in range(STAGES, total):
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        bar = ready.index(slot)
        mbarrier.expect(bar, BYTES)
        _load_weights(w_desc, bar, w_ring.index(slot), tile, at * DEPTH, upper, True, BLOCK, GATED)
        tma_load(x_desc, [0, at * DEPTH], bar, x_ring.index(slot))
        tile, at = _next_step(tile, at, programs, steps)


@gluon.jit
def _multiply_all(bias_ptr, biased, y_ptr, ring, tile, programs, tiles, steps, rows, out, BLOCK: gl.constexpr,
                  ROWS: gl.constexpr, FOLDS: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr):
    """Runs the multiplying warp group."""
    w_ring, x_ring, ready, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, ROWS * FOLDS, 16])
    step = 0
    while tile < tiles:
        acc = gl.zeros((BLOCK, ROWS * FOLDS), gl.float32, layout)
        for at in range(steps):
            slot = step % STAGES
            mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
            acc = warpgroup_mma(w_ring.index(slot), x_ring.index(slot).permute((1, 0)), acc, use_acc=at > 0,
                                is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the previous step has been read
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=at > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        _store(_summed_folds(acc, BLOCK, ROWS, FOLDS), bias_ptr, biased, y_ptr, tile, rows, out, BLOCK // FOLDS, ROWS,
               GATED)
        tile += programs


@gluon.jit
def _summed_folds(acc, BLOCK: gl.constexpr, ROWS: gl.constexpr, FOLDS: gl.constexpr):
    """Sums ``[BLOCK, ROWS * FOLDS]`` up to ``[BLOCK / FOLDS, ROWS]``: the products of equal parts."""
    if FOLDS > 1:
        layout: gl.constexpr = acc.type.layout
        part = gl.arange(0, BLOCK, gl.SliceLayout(1, layout)) % FOLDS
        other = gl.arange(0, ROWS * FOLDS, gl.SliceLayout(0, layout)) % FOLDS
        acc = gl.where(part[:, None] == other[None, :], acc, 0.0)
        acc = gl.sum(gl.sum(acc.reshape([BLOCK // FOLDS, FOLDS, ROWS, FOLDS]), 3), 1)
    return acc


@gluon.jit
def _store(acc, bias_ptr, biased, y_ptr, tile, rows, out, COLUMNS: gl.constexpr, ROWS: gl.constexpr,
           GATED: gl.constexpr):
    """Stores a tile of ``[COLUMNS, ROWS]``, transposed; where it is gated, ``silu_and_mul`` of its rounded values."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    MADE: gl.constexpr = COLUMNS // 2 if GATED else COLUMNS
    made = out // 2 if GATED else out
    column = tile * MADE + gl.arange(0, MADE, gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, layout))
    there = column < made
    has_bias = there & (biased != 0)
    if GATED:
        pairs: gl.constexpr = gl.BlockedLayout([1, 1, 2], [32, 1, 1], [1, 4, 1], [2, 0, 1])
        both = gl.convert_layout(acc.reshape([2, MADE, ROWS]).permute(1, 2, 0), pairs)
        gate, up = both.split()
        gate, up = gl.convert_layout(gate, layout), gl.convert_layout(up, layout)
        gate += gl.load(bias_ptr + column, mask=has_bias, other=0.0).to(gl.float32)[:, None]
        up += gl.load(bias_ptr + made + column, mask=has_bias, other=0.0).to(gl.float32)[:, None]
        kind: gl.constexpr = y_ptr.dtype.element_ty
        y = silu_times(gate.to(kind).to(gl.float32), up.to(kind).to(gl.float32))
    else:
        y = gl.convert_layout(acc, layout)
        y += gl.load(bias_ptr + column, mask=has_bias, other=0.0).to(gl.float32)[:, None]
    at = y_ptr + row.to(gl.int64)[None, :] * made + column[:, None]
    gl.store(at, y.to(y_ptr.dtype.element_ty), mask=there[:, None] & (row < rows)[None, :])


# ``rows`` changes with every step: specialized, it would compile while requests wait. The others change with layers.
@gluon.jit(do_not_specialize=["biased", "rows", "out", "tiles", "steps"])
def _persistent_matmul_kernel(w_desc, x_desc, bias_ptr, biased, y_ptr, rows, out, tiles, steps, BLOCK: gl.constexpr,
                              ROWS: gl.constexpr, FOLDS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
                              GATED: gl.constexpr, LOADING_WARPS: gl.constexpr, PDL: gl.constexpr):
    WIDE: gl.constexpr = ROWS * FOLDS
    start_next(PDL)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BLOCK, DEPTH], w_desc.layout)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [STAGES, WIDE, DEPTH], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    ring = (w_ring, x_ring, ready, empty)
    tile, programs = gl.program_id(0), gl.num_programs(0)
    total = gl.cdiv(tiles - tile, programs) * steps
    gl.warp_specialize([
        (_multiply_all, (bias_ptr, biased, y_ptr, ring, tile, programs, tiles, steps, rows, out, BLOCK, ROWS, FOLDS,
                         STAGES, GATED)),
        (_load_all, (w_desc, x_desc, ring, tile, programs, steps, total, out // 2 * FOLDS, BLOCK, WIDE, DEPTH, STAGES,
                     GATED, PDL)),
    ], [LOADING_WARPS], [40])


def persistent_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: PersistentTile,
                      gated: bool) -> torch.Tensor:
    """``small_m_matmul`` of contiguous ``x`` [T, in] and ``weight``, of one type of 16 bits; ``in / tile.folds`` values
    are a multiple of 16 bytes."""
    (rows, width), out = x.shape, weight.shape[0]
    y = torch.empty((rows, out // 2 if gated else out), dtype=x.dtype, device=x.device)
    folds, padded = tile.folds, tile.padded_rows(rows)
    tiles, steps = -(-out * folds // tile.block), -(-width // (folds * tile.depth))
    _persistent_matmul_kernel[(min(tiles, num_sms(x.device) * tile.programs_per_sm),)](
        _boxes(weight, folds, tile.block // 2 if gated else tile.block, tile.depth),
        _boxes(x, folds, padded * folds, tile.depth), y if bias is None else bias, int(bias is not None), y, rows, out,
        tiles, steps, BLOCK=tile.block, ROWS=padded, FOLDS=folds, DEPTH=tile.depth, STAGES=tile.stages, GATED=gated,
        LOADING_WARPS=_LOADING_WARPS, num_warps=4, maxnreg=64 if tile.block * padded * folds <= 4096 else 128,
        **_triton.pdl(x))
    return y


def _boxes(matrix: torch.Tensor, folds: int, rows: int, depth: int) -> TensorDescriptor:
    """Describes ``matrix`` [R, in] as [R * folds, in / folds], by boxes of ``rows`` and ``depth``."""
    return tma_descriptor(matrix.view(-1, matrix.shape[1] // folds), rows, depth)
