"""Multiplies many rows an expert on a Hopper GPU by warp-specialized persistent programs: four warps load, eight
multiply.

A program stays on its SM and goes through tiles of up to 128 rows x 256 of the matrix's rows. It takes the next free
tile, for tiles of one block of 64 rows take half as long as those of two. Its loads run up to ``STAGES`` steps ahead,
and across tiles, so that neither a tile's first loads nor its end leave the tensor cores idle: in short products (768
to 2048 deep) that was a third of the time. Each of two multiplying groups has one block, or none. Missing rows of an
expert's last block are not fetched, and are zero.

Larger tiles, of 256 x 192 in as many registers as there are, read less from the L2 cache, which is busy nine tenths of
the time here, and took a sixth more time (tests/bench/results, experts).

Written in Gluon, for Triton's own warp specialization refuses these loops on Hopper. It has no interpreter:
moe_sorted.py's products, which do the same, are the twins on a CPU (tests/gpu/kernels/test_moe.py compares).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from .._gluon import tma_load
from .._triton import pdl, start_next, wait_for_last
from ..gemm.tma_tiles import tma_descriptor
from ..gemm.warp_specialized_products import (
    gated_or_float8,
    product,
    scaled_product,
    scales_at,
    store_panels,
    with_bias,
)
from ..tuning.moe import Tile
from .moe_align import Alignment
from .tile_scheduler import (
    REGISTERS_AT_START,
    STEP_BYTES,
    choices_of,
    gather,
    init_scheduler,
    programs_for,
    receive_tile,
    take_next_tile,
    tile_at,
    token_of,
)

_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _load_gathered(given, b_desc, ring, step, depth, upper, lower, b_row, columns, blocks,
                   DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """Loads a tile's steps: tokens' values by the group's threads, gate and up by TMA."""
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
    """Loads a tile's steps by TMA."""
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
def _load_all(given, b_desc, ring, scheduler, work, columns, depth, GATED: gl.constexpr, COLUMNS: gl.constexpr,
              DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """Runs the loading group, which looks up the next tile before it issues this one's loads."""
    step, iteration, tile = 0, 0, gl.program_id(0)
    row, column, expert, blocks = tile_at(tile, work, COLUMNS)
    upper, lower = choices_of(work, row, blocks, 0, DEPTH), choices_of(work, row, blocks, 1, DEPTH)
    while tile < work[3] * work[4]:
        tile = take_next_tile(scheduler, iteration, work)
        next_row, next_column, next_place, next_blocks = tile_at(tile, work, COLUMNS)
        next_upper = choices_of(work, next_row, next_blocks, 0, DEPTH)
        next_lower = choices_of(work, next_row, next_blocks, 1, DEPTH)
        if expert >= 0:
            if GATED:
                step = _load_gathered(given, b_desc, ring, step, depth, token_of(upper, work[2], given),
                                      token_of(lower, work[2], given), expert * 2 * columns + column, columns, blocks,
                                      DEPTH, STAGES)
            else:
                step = _load_sorted(given, b_desc, ring, step, depth, row, expert * columns + column, blocks, DEPTH,
                                    STAGES)
        row, column, expert, blocks = next_row, next_column, next_place, next_blocks
        upper, lower = next_upper, next_lower
        iteration += 1


@gluon.jit
def _multiply_all(out_desc, outs, ring, scheduler, work, scales, bias_ptr, out_scale_ptr, columns, depth,
                  GROUP: gl.constexpr, SCALED: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr,
                  BETWEEN: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """Runs a multiplying group, for a tile's first block or its second."""
    step, iteration, tile = 0, 0, gl.program_id(0)
    row, column, expert, blocks = tile_at(tile, work, COLUMNS)
    while tile < work[3] * work[4]:
        tile = receive_tile(scheduler, iteration)
        next_row, next_column, next_place, next_blocks = tile_at(tile, work, COLUMNS)
        if expert >= 0:
            if blocks > GROUP:
                mine = row + 64 * GROUP
                if SCALED:
                    a_at, left_at, right_at = scales_at(scales, work, mine, expert, column, columns, GATED)
                    left, right, step = scaled_product(ring, step, depth, a_at, left_at, right_at, GROUP, GATED, DEPTH,
                                                       STAGES)
                else:
                    left, right, step = product(ring, step, depth, GROUP, GATED, DEPTH, STAGES)
                if bias_ptr is not None:
                    left, right = with_bias(left, right, bias_ptr, expert, column, columns, GATED)
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
        row, column, expert, blocks = next_row, next_column, next_place, next_blocks
        iteration += 1
    tma.store_wait(0)


@gluon.jit
def _ring_of(b_desc, GATED: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """Allocates shared memory of rows and of matrices, and barriers that say whether a slot is loaded, or read."""
    a_bufs = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 64, DEPTH], b_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 256, DEPTH], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=129 if GATED else 1)  # each loading thread, and TMA's bytes
        mbarrier.init(empty.index(slot), count=2)
    return a_bufs, b_bufs, ready, empty


# Sizes that change with every step, or with the layer, must not recompile the kernel.
@gluon.jit(do_not_specialize=["total", "num_spans", "band", "choices", "scale_columns", "scale_depth"])
def _moe_warp_specialized_kernel(a_desc, a_ptr, a_stride, choices, b_desc, out_desc, rows_ptr, spans_ptr, next_ptr,
                                 total, num_spans, columns, depth, band, a_scale_ptr, b_scale_ptr, bias_ptr,
                                 out_scale_ptr, scale_columns, scale_depth, SCALED: gl.constexpr, GATED: gl.constexpr,
                                 LIMIT: gl.constexpr, BETWEEN: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
                                 STAGES: gl.constexpr, PDL: gl.constexpr):
    start_next(PDL)
    outs = gl.allocate_shared_memory(out_desc.dtype, [4, 64, out_desc.block_shape[1]], out_desc.layout)
    ring = _ring_of(b_desc, GATED, DEPTH, STAGES)
    scheduler = init_scheduler(next_ptr)
    fence_async_shared()
    work = (rows_ptr, spans_ptr, total, num_spans, gl.cdiv(columns, COLUMNS), band)
    scales = (a_scale_ptr, b_scale_ptr, scale_columns, scale_depth, choices)
    given = a_desc
    if GATED:
        given = (a_ptr, a_stride, choices)
    wait_for_last(PDL)
    gl.warp_specialize([
        (_multiply_all, (out_desc, outs, ring, scheduler, work, scales, bias_ptr, out_scale_ptr, columns,
                         depth, gl.constexpr(0), SCALED, GATED, LIMIT, BETWEEN, COLUMNS, DEPTH, STAGES)),
        (_multiply_all, (out_desc, outs, ring, scheduler, work, scales, bias_ptr, out_scale_ptr, columns,
                         depth, gl.constexpr(1), SCALED, GATED, LIMIT, BETWEEN, COLUMNS, DEPTH, STAGES)),
        (_load_all, (given, b_desc, ring, scheduler, work, columns, depth, GATED, COLUMNS, DEPTH, STAGES)),
    ], [4, 4], [224, 56] if GATED else [216, 72])  # with others ptxas spills sums


def grouped_product(a: torch.Tensor, b: torch.Tensor, aligned: Alignment, choices: int, total: int, tile: Tile,
                    dtype: torch.dtype, gated: bool, a_scale: torch.Tensor | None = None,
                    b_scale: torch.Tensor | None = None, bias: torch.Tensor | None = None, limit: float = 0.0,
                    out_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Computes ``moe_sorted.moe_up`` where ``gated``, else ``moe_down``. Scales are block scales.

    With ``out_scale``, float32 [rows of aligned, N / 128] to be filled, the gated product is float8 as
    ``quantize_groups`` makes it of ``dtype``.
    """
    columns, depth = b.shape[1] // (2 if gated else 1), b.shape[2]
    assert out_scale is None or (gated and columns % 128 == 0)
    assert aligned.spans is not None and aligned.block == 64 and aligned.max_blocks == 2
    out = torch.empty((len(aligned.sorted_choices), columns), device=a.device,
                      dtype=dtype if out_scale is None else torch.float8_e4m3fn)
    sizes = (0, 0) if b_scale is None else b_scale.shape[1:]
    matrix, num_spans = tma_descriptor(b.view(-1, depth), 128 if gated else 256, tile.depth), len(aligned.spans)
    programs = programs_for(a.device, num_spans * -(-columns // tile.columns))
    _moe_warp_specialized_kernel[(programs,)](
        matrix if gated else tma_descriptor(a, 64, tile.depth), a, a.stride(0), choices, matrix,
        tma_descriptor(out, 64, 128 // out.dtype.itemsize), aligned.sorted_choices, aligned.spans, aligned.tile_counter,
        total, num_spans, columns, depth, tile.band, a_scale, b_scale, bias, out_scale, sizes[0], sizes[1],
        SCALED=b_scale is not None, GATED=gated, LIMIT=limit, BETWEEN=_TYPES[dtype], COLUMNS=tile.columns,
        DEPTH=tile.depth, STAGES=tile.stages, num_warps=4, maxnreg=REGISTERS_AT_START, **pdl(a))
    return out
