"""Grouped products of many rows an expert on a Hopper GPU, by warps with roles: four of them load, eight multiply.

A program stays on its multiprocessor and goes through tiles of 128 rows x 256 of the matrix's rows; the next one is
whichever nobody has, for blocks that are at most half full take half as long. Its loads run up to ``STAGES`` steps
ahead, into the next tile too, so that neither a tile's first loads nor its end leave the tensor cores idle: of short
products (768 to 2048 deep) that was a third of the time. Each of two multiplying groups has 64 rows; of a block that is
at most half full one of them has none.

Written in Gluon, for Triton's own split of a program into roles refuses these loops on Hopper. It has no interpreter:
moe_sorted.py's products, which do the same, are the twins on a CPU (tests/gpu/test_moe.py compares).
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .moe_align import Alignment
from .moe_tiles import Tile
from .moe_warpgroup_products import product, scaled_product, scales_at, store, store_gated, wait_for_step, with_bias

STEP_BYTES = gl.constexpr(128)
"""Depth of a step: as wide as the tensor memory accelerator's swizzle."""
REGISTERS_AT_START = 168
"""Of each of 384 threads; then groups that multiply have 216 and the one that loads 72."""
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


@gluon.jit
def _tile_at(tile, work, COLUMNS: gl.constexpr):
    """``(first row, first column, place, choice in the block's middle)``; behind the last tile the place is -1."""
    rows_ptr, place_ptr, total, num_blocks, column_blocks, band = work
    inside = tile < num_blocks * column_blocks
    first = tile // (band * column_blocks) * band
    height = gl.maximum(gl.minimum(num_blocks - first, band), 1)
    within = tile - first * column_blocks
    block = first + within % height
    place = gl.load(place_ptr + block, mask=inside, other=-1)
    middle = gl.load(rows_ptr + block * 128 + 64, mask=inside, other=0)
    return gl.where(inside, block * 128, 0), within // height * COLUMNS, place, middle


@gluon.jit
def _give_turn(turning, turn, programs):
    """The next tile that nobody has, which the multiplying groups are told too."""
    next_ptr, turns, said, heard = turning
    tile = gl.atomic_add(next_ptr, 1, sem="relaxed") + programs
    mbarrier.wait(heard.index(turn % 2), ((turn // 2) & 1) ^ 1)
    turns.index(turn % 2).store(gl.full([32], tile, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(said.index(turn % 2))
    return tile


@gluon.jit
def _take_turn(turning, turn):
    next_ptr, turns, said, heard = turning
    mbarrier.wait(said.index(turn % 2), (turn // 2) & 1)
    tile = gl.max(turns.index(turn % 2).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(heard.index(turn % 2))
    return tile


@gluon.jit
def _choices_at(work, row, DEPTH: gl.constexpr):
    """Of a block's first 64 rows and of the others."""
    layout: gl.constexpr = gl.BlockedLayout([1, DEPTH // 8], [4, 8], [4, 1], [1, 0])
    each = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    return gl.load(work[0] + each), gl.load(work[0] + each + 64)


@gluon.jit
def _tokens_at(given, choice, total, DEPTH: gl.constexpr):
    """Where the first step of 64 choices' tokens is."""
    a_ptr, a_stride, choices = given
    layout: gl.constexpr = gl.BlockedLayout([1, DEPTH // 8], [4, 8], [4, 1], [1, 0])
    token = (gl.where(choice < total, choice, 0) // choices).to(gl.int64)
    return a_ptr + token[:, None] * a_stride + gl.arange(0, DEPTH, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _load_gathered(given, b_desc, ring, step, depth, choice, lower_choice, total, b_row, columns, full,
                   DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """A tile's steps: tokens' values by the group's threads, gate and up by the tensor memory accelerator."""
    a_bufs, b_bufs, ready, empty = ring
    upper, lower = _tokens_at(given, choice, total, DEPTH), _tokens_at(given, lower_choice, total, DEPTH)
    for start in range(0, depth, DEPTH):
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        bar = ready.index(slot)
        mbarrier.expect(bar, 256 * STEP_BYTES)
        b = b_bufs.index(slot)
        tma.async_copy_global_to_shared(b_desc, [b_row, start], bar, b.slice(0, 128, 0))
        tma.async_copy_global_to_shared(b_desc, [b_row + columns, start], bar, b.slice(128, 128, 0))
        async_copy.async_copy_global_to_shared(a_bufs.index(2 * slot), upper + start)
        if full:
            async_copy.async_copy_global_to_shared(a_bufs.index(2 * slot + 1), lower + start)
        async_copy.mbarrier_arrive(bar, increment_count=False)
        step += 1
    return step


@gluon.jit
def _load_sorted(a_desc, b_desc, ring, step, depth, row, b_row, full, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """A tile's steps, all by the tensor memory accelerator."""
    a_bufs, b_bufs, ready, empty = ring
    for start in range(0, depth, DEPTH):
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        bar = ready.index(slot)
        mbarrier.expect(bar, (256 + 128) * STEP_BYTES, pred=full)
        mbarrier.expect(bar, (256 + 64) * STEP_BYTES, pred=full ^ True)
        tma.async_copy_global_to_shared(b_desc, [b_row, start], bar, b_bufs.index(slot))
        tma.async_copy_global_to_shared(a_desc, [row, start], bar, a_bufs.index(2 * slot))
        tma.async_copy_global_to_shared(a_desc, [row + 64, start], bar, a_bufs.index(2 * slot + 1), full)
        step += 1
    return step


@gluon.jit
def _load_all(given, b_desc, ring, turning, work, columns, depth, GATED: gl.constexpr, COLUMNS: gl.constexpr,
              DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """The loading group. What it needs to know of the next tile it asks for before this one's loads."""
    step, turn, tile = 0, 0, gl.program_id(0)
    row, column, place, middle = _tile_at(tile, work, COLUMNS)
    choice, lower_choice = _choices_at(work, row, DEPTH)
    while tile < work[3] * work[4]:
        tile = _give_turn(turning, turn, gl.num_programs(0))
        next_row, next_column, next_place, next_middle = _tile_at(tile, work, COLUMNS)
        next_choice, next_lower = _choices_at(work, next_row, DEPTH)
        if place >= 0:
            full = middle < work[2]
            if GATED:
                step = _load_gathered(given, b_desc, ring, step, depth, choice, lower_choice, work[2],
                                      place * 2 * columns + column, columns, full, DEPTH, STAGES)
            else:
                step = _load_sorted(given, b_desc, ring, step, depth, row, place * columns + column, full, DEPTH,
                                    STAGES)
        row, column, place, middle = next_row, next_column, next_place, next_middle
        choice, lower_choice = next_choice, next_lower
        turn += 1


@gluon.jit
def _multiply_all(out_desc, out, ring, turning, work, scales, bias_ptr, out_scale_ptr, columns, depth,
                  HALF: gl.constexpr, SCALED: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr,
                  BETWEEN: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """A multiplying group, of each block's first 64 rows or of the others."""
    step, turn, tile = 0, 0, gl.program_id(0)
    row, column, place, middle = _tile_at(tile, work, COLUMNS)
    while tile < work[3] * work[4]:
        tile = _take_turn(turning, turn)
        next_row, next_column, next_place, next_middle = _tile_at(tile, work, COLUMNS)
        if place >= 0:
            if (HALF == 0) | (middle < work[2]):
                mine = row + 64 * HALF
                if SCALED:
                    a_at, left_at, right_at = scales_at(scales, work, mine, place, column, columns, GATED)
                    left, right, step = scaled_product(ring, step, depth, a_at, left_at, right_at, HALF, GATED, DEPTH,
                                                       STAGES)
                else:
                    left, right, step = product(ring, step, depth, HALF, GATED, DEPTH, STAGES)
                if bias_ptr is not None:
                    left, right = with_bias(left, right, bias_ptr, place, column, columns, GATED)
                if GATED:
                    store_gated(out_desc, left, right, out, mine, column, columns, out_scale_ptr, LIMIT, BETWEEN)
                else:
                    store(out_desc, left, out, mine, column)
                    store(out_desc, right, out, mine, column + 128)
            else:
                for _ in range(0, depth, DEPTH):
                    mbarrier.arrive(ring[3].index(wait_for_step(ring, step, False, STAGES)))
                    step += 1
        row, column, place, middle = next_row, next_column, next_place, next_middle
        turn += 1
    tma.store_wait(0)


@gluon.jit
def _ring_of(b_desc, GATED: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    a_bufs = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 64, DEPTH], b_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 256, DEPTH], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=129 if GATED else 1)  # each loading thread, and the accelerator's bytes
        mbarrier.init(empty.index(slot), count=2)
    return a_bufs, b_bufs, ready, empty


@gluon.jit
def _turning_of(next_ptr):
    turns = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    said = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(said.index(slot), count=1)
        mbarrier.init(heard.index(slot), count=2)
    return next_ptr, turns, said, heard


# Sizes that change with every step, or with the layer, compile nothing anew.
@gluon.jit(do_not_specialize=["total", "num_blocks", "band", "choices", "scale_columns", "scale_depth"])
def _moe_warpgroups_kernel(a_desc, a_ptr, a_stride, choices, b_desc, out_desc, rows_ptr, place_ptr, next_ptr, total,
                           num_blocks, columns, depth, band, a_scale_ptr, b_scale_ptr, bias_ptr, out_scale_ptr,
                           scale_columns, scale_depth, SCALED: gl.constexpr, GATED: gl.constexpr, LIMIT: gl.constexpr,
                           BETWEEN: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    outs = gl.allocate_shared_memory(out_desc.dtype, [2, 64, 128], out_desc.layout)
    ring = _ring_of(b_desc, GATED, DEPTH, STAGES)
    turning = _turning_of(next_ptr)
    fence_async_shared()
    work = (rows_ptr, place_ptr, total, num_blocks, gl.cdiv(columns, COLUMNS), band)
    scales = (a_scale_ptr, b_scale_ptr, scale_columns, scale_depth, choices)
    given = a_desc
    if GATED:
        given = (a_ptr, a_stride, choices)
    gl.warp_specialize([
        (_multiply_all, (out_desc, outs.index(0), ring, turning, work, scales, bias_ptr, out_scale_ptr, columns,
                         depth, gl.constexpr(0), SCALED, GATED, LIMIT, BETWEEN, COLUMNS, DEPTH, STAGES)),
        (_multiply_all, (out_desc, outs.index(1), ring, turning, work, scales, bias_ptr, out_scale_ptr, columns,
                         depth, gl.constexpr(1), SCALED, GATED, LIMIT, BETWEEN, COLUMNS, DEPTH, STAGES)),
        (_load_all, (given, b_desc, ring, turning, work, columns, depth, GATED, COLUMNS, DEPTH, STAGES)),
    ], [4, 4], [216, 72])


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
    out = torch.empty((len(aligned.rows), columns), device=a.device,
                      dtype=dtype if out_scale is None else torch.float8_e4m3fn)
    num_blocks = len(aligned.place)
    sizes = (0, 0) if b_scale is None else b_scale.shape[1:]
    matrix = _tiles_of(b, 128 if gated else 256, tile.depth)
    programs = min(_multiprocessors(a.device), num_blocks * -(-columns // tile.columns))
    next_tile = torch.zeros(1, dtype=torch.int32, device=a.device)
    _moe_warpgroups_kernel[(programs,)](
        matrix if gated else _tiles_of(a, 64, tile.depth), a, a.stride(0), choices, matrix, _tiles_of(out, 64, 128),
        aligned.rows, aligned.place, next_tile, total, num_blocks, columns, depth, tile.band, a_scale, b_scale, bias,
        out_scale, sizes[0], sizes[1], SCALED=b_scale is not None, GATED=gated, LIMIT=limit, BETWEEN=_TYPES[dtype],
        COLUMNS=tile.columns, DEPTH=tile.depth, STAGES=tile.stages, num_warps=4, maxnreg=REGISTERS_AT_START)
    return out


def _tiles_of(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """``matrix``, of any number of dimensions, as rows of its last one, by tiles."""
    flat = matrix.view(-1, matrix.shape[-1])
    layout = gl.NVMMASharedLayout(STEP_BYTES, 8 * matrix.dtype.itemsize, 2)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, columns], layout)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
