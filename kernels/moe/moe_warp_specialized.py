"""Grouped products of many rows an expert on a Hopper GPU, by warps with roles: four of them load, eight multiply.

A program stays on its multiprocessor and goes through tiles of up to 128 rows x 256 of the matrix's rows; the next one
is whichever nobody has, for tiles of one block of 64 rows take half as long as those of two. Its loads run up to
``STAGES`` steps ahead, into the next tile too, so that neither a tile's first loads nor its end leave the tensor cores
idle: of short products (768 to 2048 deep) that was a third of the time. Each of two multiplying groups has one block,
or none. What an expert's last block has no rows for is not fetched, and is zero.

Larger tiles, of 256 x 192 in as many registers as there are, ask less of the second-level cache, which is busy nine
tenths of the time here, and took a sixth more time (tests/bench/results, experts).

Written in Gluon, for Triton's own split of a program into roles refuses these loops on Hopper. It has no interpreter:
moe_sorted.py's products, which do the same, are the twins on a CPU (tests/gpu/test_moe.py compares).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from .._gluon import tma_load
from .._triton import pdl, start_next, wait_for_last
from ..gemm.tma_tiles import tiles_of
from ..gemm.warp_specialized_products import (
    gated_or_float8,
    product,
    scaled_product,
    scales_at,
    store_panels,
    with_bias,
)
from .moe_align import Alignment
from .moe_tiles import Tile
from .tile_scheduler import (
    REGISTERS_AT_START,
    STEP_BYTES,
    choices_of,
    gather,
    give_turn,
    programs_for,
    take_turn,
    tile_at,
    token_of,
    turning_of,
)

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _load_gathered(given, b_desc, ring, step, depth, upper, lower, b_row, columns, blocks,
                   DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """A tile's steps: tokens' values by the group's threads, gate and up by the tensor memory accelerator."""
    a_bufs, b_bufs, ready, empty = ring
    for start in range(0, depth, DEPTH):
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        bar = ready.index(slot)
        mbarrier.expect(bar, 256 * STEP_BYTES)
        b = b_bufs.index(slot)
        tma_load(b_desc, [b_row, start], bar, b.slice(0, 128, 0))
        tma_load(b_desc, [b_row + columns, start], bar, b.slice(128, 128, 0))
        gather(given, upper, start, a_bufs.index(2 * slot), DEPTH)
        if blocks > 1:
            gather(given, lower, start, a_bufs.index(2 * slot + 1), DEPTH)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        step += 1
    return step


@gluon.jit
def _load_sorted(a_desc, b_desc, ring, step, depth, row, b_row, blocks, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """A tile's steps, all by the tensor memory accelerator."""
    a_bufs, b_bufs, ready, empty = ring
    for start in range(0, depth, DEPTH):
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        bar = ready.index(slot)
        for block in gl.static_range(2):
            mbarrier.expect(bar, (256 + 64 * (block + 1)) * STEP_BYTES, pred=blocks == block + 1)
        tma_load(b_desc, [b_row, start], bar, b_bufs.index(slot))
        for block in gl.static_range(2):
            tma_load(a_desc, [row + 64 * block, start], bar, a_bufs.index(2 * slot + block), blocks > block)
        step += 1
    return step


@gluon.jit
def _load_all(given, b_desc, ring, turning, work, columns, depth, GATED: gl.constexpr, COLUMNS: gl.constexpr,
              DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """The loading group. What it needs to know of the next tile it asks for before this one's loads."""
    step, turn, tile = 0, 0, gl.program_id(0)
    row, column, place, blocks = tile_at(tile, work, COLUMNS)
    upper, lower = choices_of(work, row, blocks, 0, DEPTH), choices_of(work, row, blocks, 1, DEPTH)
    while tile < work[3] * work[4]:
        tile = give_turn(turning, turn, work)
        next_row, next_column, next_place, next_blocks = tile_at(tile, work, COLUMNS)
        next_upper = choices_of(work, next_row, next_blocks, 0, DEPTH)
        next_lower = choices_of(work, next_row, next_blocks, 1, DEPTH)
        if place >= 0:
            if GATED:
                step = _load_gathered(given, b_desc, ring, step, depth, token_of(upper, work[2], given),
                                      token_of(lower, work[2], given), place * 2 * columns + column, columns, blocks,
                                      DEPTH, STAGES)
            else:
                step = _load_sorted(given, b_desc, ring, step, depth, row, place * columns + column, blocks, DEPTH,
                                    STAGES)
        row, column, place, blocks = next_row, next_column, next_place, next_blocks
        upper, lower = next_upper, next_lower
        turn += 1


@gluon.jit
def _multiply_all(out_desc, outs, ring, turning, work, scales, bias_ptr, out_scale_ptr, columns, depth,
                  GROUP: gl.constexpr, SCALED: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr,
                  BETWEEN: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """A multiplying group, of the first of the blocks that a tile has, or of the other."""
    step, turn, tile = 0, 0, gl.program_id(0)
    row, column, place, blocks = tile_at(tile, work, COLUMNS)
    while tile < work[3] * work[4]:
        tile = take_turn(turning, turn)
        next_row, next_column, next_place, next_blocks = tile_at(tile, work, COLUMNS)
        if place >= 0:
            if blocks > GROUP:
                mine = row + 64 * GROUP
                if SCALED:
                    a_at, left_at, right_at = scales_at(scales, work, mine, place, column, columns, GATED)
                    left, right, step = scaled_product(ring, step, depth, a_at, left_at, right_at, GROUP, GATED, DEPTH,
                                                       STAGES)
                else:
                    left, right, step = product(ring, step, depth, GROUP, GATED, DEPTH, STAGES)
                if bias_ptr is not None:
                    left, right = with_bias(left, right, bias_ptr, place, column, columns, GATED)
                if GATED:
                    made = gated_or_float8(left, right, mine, column, columns, out_scale_ptr, LIMIT, BETWEEN)
                    store_panels(out_desc, made, outs, 0, mine, column, GROUP)
                else:
                    store_panels(out_desc, left, outs, 0, mine, column, GROUP)
                    store_panels(out_desc, right, outs, 2, mine, column, GROUP)
            else:
                for _ in range(0, depth, DEPTH):
                    mbarrier.wait(ring[2].index(step % STAGES), (step // STAGES) & 1)
                    mbarrier.arrive(ring[3].index(step % STAGES))
                    step += 1
        row, column, place, blocks = next_row, next_column, next_place, next_blocks
        turn += 1
    tma.store_wait(0)


@gluon.jit
def _ring_of(b_desc, GATED: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory of rows and of matrices; barriers that tell of each slot that it is loaded, or read."""
    a_bufs = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 64, DEPTH], b_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 256, DEPTH], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=129 if GATED else 1)  # each loading thread, and the accelerator's bytes
        mbarrier.init(empty.index(slot), count=2)
    return a_bufs, b_bufs, ready, empty


# Sizes that change with every step, or with the layer, compile nothing anew.
@gluon.jit(do_not_specialize=["total", "num_spans", "band", "choices", "scale_columns", "scale_depth"])
def _moe_warpgroups_kernel(a_desc, a_ptr, a_stride, choices, b_desc, out_desc, rows_ptr, spans_ptr, next_ptr, total,
                           num_spans, columns, depth, band, a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr,
                           scale_columns, scale_depth, SCALED: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr,
                           BETWEEN: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
                           PDL: gl.constexpr):
    start_next(PDL)
    outs = gl.allocate_shared_memory(out_desc.dtype, [4, 64, out_desc.block_shape[1]], out_desc.layout)
    ring = _ring_of(b_desc, GATED, DEPTH, STAGES)
    turning = turning_of(next_ptr)
    fence_async_shared()
    work = (rows_ptr, spans_ptr, total, num_spans, gl.cdiv(columns, COLUMNS), band)
    scales = (a_scale_ptr, b_scale_ptr, scale_columns, scale_depth, choices)
    given = a_desc
    if GATED:
        given = (a_ptr, a_stride, choices)
    wait_for_last(PDL)
    gl.warp_specialize([
        (_multiply_all, (out_desc, outs, ring, turning, work, scales, bias_ptr, out_scale_ptr, columns,
                         depth, gl.constexpr(0), SCALED, GATED, LIMIT, BETWEEN, COLUMNS, DEPTH, STAGES)),
        (_multiply_all, (out_desc, outs, ring, turning, work, scales, bias_ptr, out_scale_ptr, columns,
                         depth, gl.constexpr(1), SCALED, GATED, LIMIT, BETWEEN, COLUMNS, DEPTH, STAGES)),
        (_load_all, (given, b_desc, ring, turning, work, columns, depth, GATED, COLUMNS, DEPTH, STAGES)),
    ], [4, 4], [224, 56] if GATED else [216, 72])  # with others ptxas spills sums


def grouped_product(a: torch.Tensor, b: torch.Tensor, aligned: Alignment, choices: int, total: int, tile: Tile,
                    dtype: torch.dtype, gated: bool, a_scale: torch.Tensor | None = None,
                    b_scale: torch.Tensor | None = None, bias: torch.Tensor | None = None, limit: float = 0.0,
                    out_scale: torch.Tensor | None = None) -> torch.Tensor:
    """``gated``: what ``moe_sorted.moe_up`` makes; else ``moe_down``'s. Scales are of blocks.

    With ``out_scale``, float32 [rows of aligned, N / 128] to be filled, the gated product is float8 as
    ``quantize_groups`` makes it of ``dtype``.
    """
    columns, depth = b.shape[1] // (2 if gated else 1), b.shape[2]
    assert out_scale is None or (gated and columns % 128 == 0)
    assert aligned.spans is not None and aligned.block == 64 and aligned.tall == 2
    out = torch.empty((len(aligned.rows), columns), device=a.device,
                      dtype=dtype if out_scale is None else torch.float8_e4m3fn)
    sizes = (0, 0) if b_scale is None else b_scale.shape[1:]
    matrix, num_spans = tiles_of(b.view(-1, depth), 128 if gated else 256, tile.depth), len(aligned.spans)
    programs = programs_for(a.device, num_spans * -(-columns // tile.columns))
    _moe_warpgroups_kernel[(programs,)](
        matrix if gated else tiles_of(a, 64, tile.depth), a, a.stride(0), choices, matrix,
        tiles_of(out, 64, 128 // out.dtype.itemsize), aligned.rows, aligned.spans, aligned.turn, total, num_spans,
        columns, depth, tile.band, a_scale, b_scale, bias, out_scale, sizes[0], sizes[1], SCALED=b_scale is not None,
        GATED=gated, LIMIT=limit, BETWEEN=_TYPES[dtype], COLUMNS=tile.columns, DEPTH=tile.depth, STAGES=tile.stages,
        num_warps=4, maxnreg=REGISTERS_AT_START, **pdl(a))
    return out
