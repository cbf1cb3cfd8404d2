"""Multiplies many rows with a dense weight on a Hopper GPU, by warp groups of 64 rows each.

A program stays on its SM and goes through tiles of 128 or 192 rows x 256 of the weight's rows. A gated product's are
128 gates and their 128 ups, so that the activation is applied to the sums before they leave the SM: neither gates nor
ups are written. The first group loads for all groups, ``STAGES`` - 1 steps ahead and across tiles: a group that only
loads would take the third one's registers.

A step of prefill is bound by the card's power, and moving data takes power: tiles of 192 rows, which share one load of
the weight, save 1.4 % of a layer's time compared with 128.

Written in Gluon, which has no interpreter: ``linear`` and ``silu_and_mul`` are the twin (tests/gpu compares).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .._gluon import tma_load
from ..device import num_sms
from ..tuning.gemm import WarpSpecializedTile
from .tma_tiles import tma_descriptor
from .warp_specialized_gate import gate_times_exactly
from .warp_specialized_products import store, store_gated, wait_for_step

DEPTH = gl.constexpr(64)
"""Values of a step: as wide, in bytes, as TMA's swizzle."""
REGISTERS = 168
"""Registers of each thread, of which 128 hold sums."""


@gluon.jit
def _tile_at(tile, work, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """``(first row, first column)`` of a tile; arbitrary after the last one. Tiles go through a band of row blocks
    column by column, since its rows and the few columns that all programs read fit the L2 cache."""
    row_blocks, column_blocks, band = work
    first = tile // (band * column_blocks) * band
    height = gl.maximum(gl.minimum(row_blocks - first, band), 1)
    within = tile - first * column_blocks
    return (first + within % height) * ROWS, within // height * COLUMNS


@gluon.jit
def _load(a_desc, b_desc, ring, step, row, column, other, start, more, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Loads a step from ``start`` on of the tile at ``row``, and of the weight's rows from ``column`` and from
    ``other`` on, once all groups have read the slot's previous content; nothing unless ``more``."""
    a_bufs, b_bufs, ready, empty = ring
    slot = step % STAGES
    mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1, pred=more)
    bar, b = ready.index(slot), b_bufs.index(slot)
    mbarrier.expect(bar, (256 + 64 * GROUPS) * DEPTH * 2, pred=more)
    tma_load(b_desc, [column, start], bar, b.slice(0, 128, 0), more)
    tma_load(b_desc, [other, start], bar, b.slice(128, 128, 0), more)
    for group in gl.static_range(GROUPS):
        tma_load(a_desc, [row + 64 * group, start], bar, a_bufs.index(GROUPS * slot + group), more)


@gluon.jit
def _multiply(descs, out, ring, work, columns, depth, GROUP: gl.constexpr, GROUPS: gl.constexpr, GATED: gl.constexpr,
              EXACT: gl.constexpr, STAGES: gl.constexpr):
    """Runs a multiplying group, for each tile's rows from the 64 * ``GROUP``-th on."""
    a_desc, b_desc, out_desc = descs
    a_bufs, b_bufs, ready, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    AHEAD: gl.constexpr = STAGES - 1
    step, tile, tiles = 0, gl.program_id(0), work[0] * work[1]
    COLUMNS: gl.constexpr = 128 if GATED else 256
    row, column = _tile_at(tile, work, 64 * GROUPS, COLUMNS)
    pair_offset = columns if GATED else 128
    if GROUP == 0:
        for first in gl.static_range(AHEAD):
            _load(a_desc, b_desc, ring, first, row, column, column + pair_offset, first * DEPTH, True, GROUPS, STAGES)
    while tile < tiles:
        tile += gl.num_programs(0)
        next_row, next_column = _tile_at(tile, work, 64 * GROUPS, COLUMNS)
        acc = gl.zeros((64, 256), gl.float32, layout)
        for start in range(0, depth, DEPTH):
            slot = wait_for_step(ring, step, False, STAGES)
            acc = warpgroup_mma(a_bufs.index(GROUPS * slot + GROUP), b_bufs.index(slot).permute((1, 0)), acc,
                                use_acc=start > 0, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))  # the previous step has been read
            mbarrier.arrive(empty.index((step + AHEAD) % STAGES), pred=start > 0)
            if GROUP == 0:
                ahead = start + AHEAD * DEPTH
                inside = ahead < depth
                at = gl.where(inside, column, next_column)
                _load(a_desc, b_desc, ring, step + AHEAD, gl.where(inside, row, next_row), at, at + pair_offset,
                      gl.where(inside, ahead, ahead - depth), inside | (tile < tiles), GROUPS, STAGES)
            step += 1
        made = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((step + AHEAD) % STAGES))
        left, right = made.reshape([64, 2, 128]).permute(0, 2, 1).split()
        if EXACT:
            store(out_desc, gate_times_exactly(left, right, out_desc.dtype), out, row + 64 * GROUP, column)
        elif GATED:
            store_gated(out_desc, left, right, out, row + 64 * GROUP, column, columns, None, 0.0, out_desc.dtype)
        else:
            store(out_desc, left, out, row + 64 * GROUP, column)
            store(out_desc, right, out, row + 64 * GROUP, column + 128)
        row, column = next_row, next_column
    tma.store_wait(0)


# Sizes that change with every step must not recompile the kernel.
@gluon.jit(do_not_specialize=["row_blocks", "band"])
def _dense_warp_specialized_kernel(a_desc, b_desc, out_desc, row_blocks, columns, depth, band, GATED: gl.constexpr,
                                   EXACT: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """``depth`` is a multiple of a step's."""
    outs = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 64, 128], out_desc.layout)
    a_bufs = gl.allocate_shared_memory(b_desc.dtype, [GROUPS * STAGES, 64, DEPTH], b_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 256, DEPTH], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    fence_async_shared()
    ring = (a_bufs, b_bufs, ready, empty)
    COLUMNS: gl.constexpr = 128 if GATED else 256
    descs, work = (a_desc, b_desc, out_desc), (row_blocks, gl.cdiv(columns, COLUMNS), band)
    if GROUPS == 2:
        gl.warp_specialize([
            (_multiply, (descs, outs.index(0), ring, work, columns, depth, gl.constexpr(0), GROUPS, GATED, EXACT,
                         STAGES)),
            (_multiply, (descs, outs.index(1), ring, work, columns, depth, gl.constexpr(1), GROUPS, GATED, EXACT,
                         STAGES)),
        ], [4], [168])
    else:
        gl.warp_specialize([
            (_multiply, (descs, outs.index(0), ring, work, columns, depth, gl.constexpr(0), GROUPS, GATED, EXACT,
                         STAGES)),
            (_multiply, (descs, outs.index(1), ring, work, columns, depth, gl.constexpr(1), GROUPS, GATED, EXACT,
                         STAGES)),
            (_multiply, (descs, outs.index(2), ring, work, columns, depth, gl.constexpr(2), GROUPS, GATED, EXACT,
                         STAGES)),
        ], [4, 4], [168, 168])


def warp_specialized_matmul(x: torch.Tensor, weight: torch.Tensor, tile: WarpSpecializedTile, *,
                            gated: bool = False, exact: bool = False) -> torch.Tensor:
    """``x`` [T, in] ``@ weight`` [out, in] ``.T``: ``[T, out]``; or ``silu_and_mul`` of that, [T, out / 2]. Both are of
    16 bits, their rows multiples of 16 bytes and longer than ``tile.stages`` - 2 steps. ``exact``: the activation has
    the bits of that kernel's, which rounds gates and ups first."""
    columns, depth = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    steps = -(-depth // 64)
    assert steps >= tile.stages - 1
    out = torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
    row_blocks = -(-len(x) // tile.rows)
    programs = min(num_sms(x.device), row_blocks * -(-columns // (128 if gated else 256)))
    _dense_warp_specialized_kernel[(programs,)](
        tma_descriptor(x, 64, 64), tma_descriptor(weight, 128, 64), tma_descriptor(out, 64, 128), row_blocks, columns,
        64 * steps, tile.band, GATED=gated, EXACT=gated and exact, GROUPS=tile.rows // 64, STAGES=tile.stages,
        num_warps=4, maxnreg=REGISTERS)
    return out
