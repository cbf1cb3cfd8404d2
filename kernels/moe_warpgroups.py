"""Grouped products of many rows an expert on a Hopper GPU, by warps with roles: four of them load, eight multiply.

A program stays on its multiprocessor and goes through tiles of 128 rows x 256 of the matrix's rows. Its loads run up to
``STAGES`` steps ahead, into the next tile too, so that neither a tile's first loads nor its end leave the tensor cores
idle: of short products (768 to 2048 deep) that was a third of the time. Each of two multiplying groups has 64 rows; a
block that is at most half full keeps one of them busy, for half as long.

Written in Gluon, for Triton's own split of a program into roles refuses these loops on Hopper. It has no interpreter:
moe_sorted.py's products, which do the same, are the twins on a CPU (tests/gpu/test_moe.py compares).
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import reference
from .moe_align import Alignment
from .moe_tiles import Tile

STEP_BYTES = 128
"""Depth of a step: as wide as the tensor memory accelerator's swizzle."""
MATRIX_ROWS = 256
"""Of a step's matrix: 128 of the gate and 128 of the up product, or 256 columns of the down product."""
FP8_LARGEST, FP8_LEAST = gl.constexpr(reference.FP8_LARGEST), gl.constexpr(reference.FP8_LEAST)
_TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
REGISTERS_AT_START = 168
"""Of each of 384 threads; then groups that multiply have 216 and the one that loads 72."""


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
    return block * 128, within // height * COLUMNS, place, middle


@gluon.jit
def _token_tile(given, work, row, DEPTH: gl.constexpr):
    """Where the first step of 64 rows' tokens is."""
    a_ptr, a_stride, choices = given
    layout: gl.constexpr = gl.BlockedLayout([1, DEPTH // 8], [4, 8], [4, 1], [1, 0])
    choice = gl.load(work[0] + row + gl.arange(0, 64, gl.SliceLayout(1, layout)))
    token = (gl.where(choice < work[2], choice, 0) // choices).to(gl.int64)
    return a_ptr + token[:, None] * a_stride + gl.arange(0, DEPTH, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _load_matrix(b_desc, b, ready, b_row, columns, start, GATED: gl.constexpr):
    if GATED:
        tma.async_copy_global_to_shared(b_desc, [b_row, start], ready, b.slice(0, 128, 0))
        tma.async_copy_global_to_shared(b_desc, [b_row + columns, start], ready, b.slice(128, 128, 0))
    else:
        tma.async_copy_global_to_shared(b_desc, [b_row, start], ready, b)


@gluon.jit
def _load_all(given, b_desc, ring, work, columns, depth, GATED: gl.constexpr, COLUMNS: gl.constexpr,
              DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """The loading group. Tokens (``GATED``) are gathered by its threads, row by row; sorted rows come as tiles."""
    a_bufs, b_bufs, ready, empty = ring
    MATRIX: gl.constexpr = 256 * 128
    ROWS: gl.constexpr = 64 * 128
    step = 0
    row, column, place, middle = _tile_at(gl.program_id(0), work, COLUMNS)
    for tile in range(gl.program_id(0), work[3] * work[4], gl.num_programs(0)):
        if place >= 0:
            full = middle < work[2]
            b_row = place * columns + column
            if GATED:
                b_row += place * columns
                upper = _token_tile(given, work, row, DEPTH)
                lower = _token_tile(given, work, row + 64, DEPTH)
            for start in range(0, depth, DEPTH):
                slot = step % STAGES
                mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
                bar = ready.index(slot)
                if GATED:
                    mbarrier.expect(bar, MATRIX)
                else:
                    mbarrier.expect(bar, MATRIX + 2 * ROWS, pred=full)
                    mbarrier.expect(bar, MATRIX + ROWS, pred=full ^ True)
                _load_matrix(b_desc, b_bufs.index(slot), bar, b_row, columns, start, GATED)
                if GATED:
                    async_copy.async_copy_global_to_shared(a_bufs.index(2 * slot), upper + start)
                    if full:
                        async_copy.async_copy_global_to_shared(a_bufs.index(2 * slot + 1), lower + start)
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                else:
                    tma.async_copy_global_to_shared(given, [row, start], bar, a_bufs.index(2 * slot))
                    tma.async_copy_global_to_shared(given, [row + 64, start], bar, a_bufs.index(2 * slot + 1), full)
                step += 1
        row, column, place, middle = _tile_at(tile + gl.num_programs(0), work, COLUMNS)


@gluon.jit
def _wait_for_step(ring, step, GATED: gl.constexpr, STAGES: gl.constexpr):
    mbarrier.wait(ring[2].index(step % STAGES), (step // STAGES) & 1)
    if GATED:  # threads' copies are seen by the tensor cores
        fence_async_shared()
    return step % STAGES


@gluon.jit
def _product(ring, step, depth, HALF: gl.constexpr, GATED: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """``(the first 128 columns, the others, the step behind)``."""
    a_bufs, b_bufs, ready, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 256, 16])
    acc = gl.zeros((64, 256), gl.float32, layout)
    for start in range(0, depth, DEPTH):
        slot = _wait_for_step(ring, step, GATED, STAGES)
        acc = warpgroup_mma(a_bufs.index(2 * slot + HALF), b_bufs.index(slot).permute((1, 0)), acc, use_acc=start > 0,
                            is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before has been read
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=start > 0)
        step += 1
    made = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    left, right = made.reshape([64, 2, 128]).permute(0, 2, 1).split()
    return left, right, step


@gluon.jit
def _scaled_product(ring, step, depth, a_scale_at, left_at, right_at, HALF: gl.constexpr, GATED: gl.constexpr,
                    DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """As ``_product``, of float8 with a scale for each row's and each matrix's 128 values of depth."""
    a_bufs, b_bufs, ready, empty = ring
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    zero = gl.zeros((64, 128), gl.float32, layout)
    left, right = zero, zero
    a_scale, left_scale, right_scale = gl.load(a_scale_at), gl.load(left_at), gl.load(right_at)
    for start in range(0, depth, DEPTH):
        slot = _wait_for_step(ring, step, GATED, STAGES)
        a, b = a_bufs.index(2 * slot + HALF), b_bufs.index(slot)
        part = warpgroup_mma(a, b.slice(0, 128, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        ahead = start // DEPTH + 1  # asked for before they are needed
        more = start + DEPTH < depth
        next_a = gl.load(a_scale_at + ahead, mask=more, other=0.0)
        next_left = gl.load(left_at + ahead, mask=more, other=0.0)
        next_right = gl.load(right_at + ahead, mask=more, other=0.0)
        part = warpgroup_mma_wait(0, deps=(part,))
        left += part * (a_scale * left_scale)[:, None]
        part = warpgroup_mma(a, b.slice(128, 128, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
        part = warpgroup_mma_wait(0, deps=(part,))
        mbarrier.arrive(empty.index(slot))
        right += part * (a_scale * right_scale)[:, None]
        a_scale, left_scale, right_scale = next_a, next_left, next_right
        step += 1
    return left, right, step


@gluon.jit
def _row_scales(scales, work, row, GATED: gl.constexpr):
    """Where the first scales of 64 rows are; tokens' by their choices."""
    a_scale_ptr, b_scale_ptr, scale_columns, scale_depth, choices, out_scale_ptr = scales
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32])
    each = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    if GATED:
        choice = gl.load(work[0] + each)
        each = gl.where(choice < work[2], choice, 0) // choices
    return a_scale_ptr + each * scale_depth


@gluon.jit
def _store(out_desc, made, out, row, column):
    """By the tensor memory accelerator, once it has read what ``out`` held before."""
    tma.store_wait(0)
    out.store(made.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], out)


@gluon.jit
def _store_gated(out_desc, left, right, out, row, column, columns, out_scale_ptr, BETWEEN: gl.constexpr):
    """In float8, where there are scales to write, as fp8_quantize.py would make it of ``BETWEEN``'s type."""
    made = left / (1.0 + gl.exp(-left)) * right
    if out_scale_ptr is not None:
        made = made.to(BETWEEN).to(gl.float32)
        scale = gl.maximum(gl.max(gl.abs(made), 1), FP8_LEAST) / FP8_LARGEST
        each = row + gl.arange(0, 64, scale.type.layout)
        gl.store(out_scale_ptr + each * (columns // 128) + column // 128, scale)
        made = gl.minimum(gl.maximum(made / gl.expand_dims(scale, 1), -FP8_LARGEST), FP8_LARGEST)
    _store(out_desc, made, out, row, column)


@gluon.jit
def _multiply_all(out_desc, out, ring, work, scales, columns, depth, HALF: gl.constexpr, SCALED: gl.constexpr,
                  GATED: gl.constexpr, BETWEEN: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr,
                  STAGES: gl.constexpr):
    """A multiplying group, of each block's first 64 rows or of the others."""
    step = 0
    row, column, place, middle = _tile_at(gl.program_id(0), work, COLUMNS)
    for tile in range(gl.program_id(0), work[3] * work[4], gl.num_programs(0)):
        next_row, next_column, next_place, next_middle = _tile_at(tile + gl.num_programs(0), work, COLUMNS)
        if place >= 0:
            if (HALF == 0) | (middle < work[2]):
                mine = row + 64 * HALF
                if SCALED:
                    left_at = scales[1] + (place * scales[2] + column // 128) * scales[3]
                    right_at = left_at + (columns // 128 if GATED else 1) * scales[3]
                    left, right, step = _scaled_product(ring, step, depth, _row_scales(scales, work, mine, GATED),
                                                        left_at, right_at, HALF, GATED, DEPTH, STAGES)
                else:
                    left, right, step = _product(ring, step, depth, HALF, GATED, DEPTH, STAGES)
                if GATED:
                    _store_gated(out_desc, left, right, out, mine, column, columns, scales[5], BETWEEN)
                else:
                    _store(out_desc, left, out, mine, column)
                    _store(out_desc, right, out, mine, column + 128)
            else:
                for _ in range(0, depth, DEPTH):
                    mbarrier.arrive(ring[3].index(_wait_for_step(ring, step, False, STAGES)))
                    step += 1
        row, column, place, middle = next_row, next_column, next_place, next_middle
    tma.store_wait(0)


# Sizes that change with every step, or with the layer, compile nothing anew.
@gluon.jit(do_not_specialize=["total", "num_blocks", "band", "choices", "scale_columns", "scale_depth"])
def _moe_warpgroups_kernel(a_desc, a_ptr, a_stride, choices, b_desc, out_desc, rows_ptr, place_ptr, total, num_blocks,
                           columns, depth, band, a_scale_ptr, b_scale_ptr, out_scale_ptr, scale_columns,
                           scale_depth, SCALED: gl.constexpr, GATED: gl.constexpr, BETWEEN: gl.constexpr,
                           COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    a_bufs = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 64, DEPTH], b_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 256, DEPTH], b_desc.layout)
    outs = gl.allocate_shared_memory(out_desc.dtype, [2, 64, 128], out_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=129 if GATED else 1)  # each loading thread, and the accelerator's bytes
        mbarrier.init(empty.index(slot), count=2)
    fence_async_shared()
    ring = (a_bufs, b_bufs, ready, empty)
    work = (rows_ptr, place_ptr, total, num_blocks, gl.cdiv(columns, COLUMNS), band)
    scales = (a_scale_ptr, b_scale_ptr, scale_columns, scale_depth, choices, out_scale_ptr)
    given = a_desc
    if GATED:
        given = (a_ptr, a_stride, choices)
    gl.warp_specialize([
        (_multiply_all, (out_desc, outs.index(0), ring, work, scales, columns, depth, gl.constexpr(0), SCALED, GATED,
                         BETWEEN, COLUMNS, DEPTH, STAGES)),
        (_multiply_all, (out_desc, outs.index(1), ring, work, scales, columns, depth, gl.constexpr(1), SCALED, GATED,
                         BETWEEN, COLUMNS, DEPTH, STAGES)),
        (_load_all, (given, b_desc, ring, work, columns, depth, GATED, COLUMNS, DEPTH, STAGES)),
    ], [4, 4], [216, 72])


def grouped_product(a: torch.Tensor, b: torch.Tensor, aligned: Alignment, choices: int, total: int, tile: Tile,
                    dtype: torch.dtype, gated: bool, a_scale: torch.Tensor | None = None,
                    b_scale: torch.Tensor | None = None, out_scale: torch.Tensor | None = None) -> torch.Tensor:
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
    _moe_warpgroups_kernel[(programs,)](
        matrix if gated else _tiles_of(a, 64, tile.depth), a, a.stride(0), choices, matrix, _tiles_of(out, 64, 128),
        aligned.rows, aligned.place, total, num_blocks, columns, depth, tile.band, a_scale, b_scale, out_scale,
        sizes[0], sizes[1], SCALED=b_scale is not None, GATED=gated, BETWEEN=_TYPES[dtype], COLUMNS=tile.columns,
        DEPTH=tile.depth, STAGES=tile.stages, num_warps=4, maxnreg=REGISTERS_AT_START)
    return out


def _tiles_of(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """``matrix``, of any number of dimensions, as rows of its last one, by tiles."""
    flat = matrix.view(-1, matrix.shape[-1])
    layout = gl.NVMMASharedLayout(STEP_BYTES, 8 * matrix.dtype.itemsize, 2)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, columns], layout)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
