"""Products of many rows with a dense weight on a Hopper GPU, by warps with roles: one loads, eight multiply.

A program stays on its multiprocessor and goes through tiles of 128 rows x 256 of the weight's rows. A gated product's
are 128 of gates and the 128 of ups that belong to them, so that the activation is made of the sums before they leave
the multiprocessor: neither gates nor ups are written. Loads run up to ``stages`` steps ahead, into the next tile too.

Written in Gluon, which has no interpreter: ``linear`` and ``silu_and_mul`` are the twin (tests/gpu compares).
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .moe_warpgroup_products import product, store, store_gated

STEP_BYTES = gl.constexpr(128)
"""Depth of a step: as wide as the tensor memory accelerator's swizzle."""
REGISTERS_AT_START = 168
"""Of each of 384 threads; then groups that multiply have 232 and the one that loads 40."""


@gluon.jit
def _tile_at(tile, work, COLUMNS: gl.constexpr):
    """``(first row, first column)``: through a band of row blocks column by column, for its rows and the few columns
    that all programs are at find room in the second-level cache."""
    row_blocks, column_blocks, band = work
    first = tile // (band * column_blocks) * band
    height = gl.minimum(row_blocks - first, band)
    within = tile - first * column_blocks
    return (first + within % height) * 128, within // height * COLUMNS


@gluon.jit
def _load_all(a_desc, b_desc, ring, work, columns, depth, GATED: gl.constexpr, COLUMNS: gl.constexpr,
              DEPTH: gl.constexpr, STAGES: gl.constexpr):
    a_bufs, b_bufs, ready, empty = ring
    step = 0
    for tile in range(gl.program_id(0), work[0] * work[1], gl.num_programs(0)):
        row, column = _tile_at(tile, work, COLUMNS)
        other = column + (columns if GATED else 128)
        for start in range(0, depth, DEPTH):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            bar, b = ready.index(slot), b_bufs.index(slot)
            mbarrier.expect(bar, (256 + 128) * STEP_BYTES)
            tma.async_copy_global_to_shared(b_desc, [column, start], bar, b.slice(0, 128, 0))
            tma.async_copy_global_to_shared(b_desc, [other, start], bar, b.slice(128, 128, 0))
            tma.async_copy_global_to_shared(a_desc, [row, start], bar, a_bufs.index(2 * slot))
            tma.async_copy_global_to_shared(a_desc, [row + 64, start], bar, a_bufs.index(2 * slot + 1))
            step += 1


@gluon.jit
def _multiply_all(out_desc, out, ring, work, columns, depth, GROUP: gl.constexpr, GATED: gl.constexpr,
                  COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    """A multiplying group, of each tile's rows from the 64 * ``GROUP``-th on."""
    step = 0
    for tile in range(gl.program_id(0), work[0] * work[1], gl.num_programs(0)):
        row, column = _tile_at(tile, work, COLUMNS)
        left, right, step = product(ring, step, depth, GROUP, False, DEPTH, STAGES)
        if GATED:
            store_gated(out_desc, left, right, out, row + 64 * GROUP, column, columns, None, 0.0, out_desc.dtype)
        else:
            store(out_desc, left, out, row + 64 * GROUP, column)
            store(out_desc, right, out, row + 64 * GROUP, column + 128)
    tma.store_wait(0)


@gluon.jit
def _ring_of(b_desc, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    a_bufs = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 64, DEPTH], b_desc.layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, 256, DEPTH], b_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)  # multiplying groups
    return a_bufs, b_bufs, ready, empty


# Sizes that change with every step compile nothing anew.
@gluon.jit(do_not_specialize=["row_blocks", "band"])
def _dense_warpgroups_kernel(a_desc, b_desc, out_desc, row_blocks, columns, depth, band, GATED: gl.constexpr,
                             COLUMNS: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    outs = gl.allocate_shared_memory(out_desc.dtype, [2, 64, 128], out_desc.layout)
    ring = _ring_of(b_desc, DEPTH, STAGES)
    fence_async_shared()
    work = (row_blocks, gl.cdiv(columns, COLUMNS), band)
    gl.warp_specialize([
        (_multiply_all, (out_desc, outs.index(0), ring, work, columns, depth, gl.constexpr(0), GATED, COLUMNS, DEPTH,
                         STAGES)),
        (_multiply_all, (out_desc, outs.index(1), ring, work, columns, depth, gl.constexpr(1), GATED, COLUMNS, DEPTH,
                         STAGES)),
        (_load_all, (a_desc, b_desc, ring, work, columns, depth, GATED, COLUMNS, DEPTH, STAGES)),
    ], [4, 1], [232, 40])


def dense_product(x: torch.Tensor, weight: torch.Tensor, *, gated: bool = False, band: int = 16,
                  stages: int = 4) -> torch.Tensor:
    """``x`` [T, in] ``@ weight`` [out, in] ``.T``: ``[T, out]``; or ``silu_and_mul`` of that, [T, out / 2]. Of 16 bits,
    in rows of whole 16 bytes. ``band``: blocks of 128 rows whose tiles are computed in turn."""
    columns, depth = weight.shape[0] // (2 if gated else 1), weight.shape[1]
    out = torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
    row_blocks, wide = -(-len(x) // 128), 128 if gated else 256
    programs = min(_multiprocessors(x.device), row_blocks * -(-columns // wide))
    _dense_warpgroups_kernel[(programs,)](
        _tiles_of(x, 64, 64), _tiles_of(weight, 128, 64), _tiles_of(out, 64, 128), row_blocks, columns, depth, band,
        GATED=gated, COLUMNS=wide, DEPTH=64, STAGES=stages, num_warps=4, maxnreg=REGISTERS_AT_START)
    return out


def _tiles_of(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(STEP_BYTES, 8 * matrix.dtype.itemsize, 2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], layout)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
