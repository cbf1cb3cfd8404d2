"""Products of 65 to 256 rows with a weight on a Hopper GPU: each weight is read once.

A tile is all the rows beside ``2 * height`` of the weight's, and a program's work; where tiles are few, each is
``pieces`` programs' work, whose sums are left to a kernel that reads the product anyway. Sums are added in the same
order always.

A program is a warp that loads and two groups of four that multiply, each 64 or 128 of the weight's rows: the weight is
the tensor cores' left side, so that its rows are the many. Loads run ``stages`` steps ahead, and the first weights are
asked for before the kernel ahead has made the rows.

Gates and ups that end in the activation are loaded by eights, for both are then in the same thread.

Written in Gluon; ``linear`` is the twin (tests/gpu/test_split_warpgroups.py compares).
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._gluon import barrier, reinterpret, tma_load, tma_store
from .._triton import pdl, start_next, wait_for_last
from ..rowwise.silu_and_mul import silu_times
from .split_k_tiles import SplitKTile
from .tma_tiles import tiles_of

GROUPS = gl.constexpr(2)
CHUNK = gl.constexpr(64)
"""Rows of which a group turns its sums around at a time."""
REGISTERS_AT_START = 168
"""Of each of 384 threads; then groups that multiply have 232 and the one that loads 40."""


@gluon.jit
def _load_weights(w_desc, w_bufs, slot, bar, tile, depth, HEIGHT: gl.constexpr, DEPTH: gl.constexpr,
                  GATED: gl.constexpr):
    for group in gl.static_range(GROUPS):
        buf = w_bufs.index(GROUPS * slot + group)
        if GATED:
            eights = reinterpret(buf, w_desc.dtype, [HEIGHT // 16, 2, 8, DEPTH], w_desc.layout)
            tma_load(w_desc, [(tile * GROUPS + group) * (HEIGHT // 16), 0, 0, depth], bar, eights)
        else:
            tma_load(w_desc, [(tile * GROUPS + group) * HEIGHT, depth], bar, buf)


@gluon.jit
def _load_all(w_desc, x_desc, ring, tile, begin, end, ROWS: gl.constexpr, HEIGHT: gl.constexpr, DEPTH: gl.constexpr,
              STAGES: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr):
    """The loading warp, of a tile's steps from ``begin`` to ``end``."""
    BYTES: gl.constexpr = (GROUPS * HEIGHT + ROWS) * DEPTH * 2
    w_bufs, x_bufs, ready, empty = ring
    early = gl.minimum(end - begin, STAGES)
    for slot in range(early):
        bar = ready.index(slot)
        mbarrier.expect(bar, BYTES)
        _load_weights(w_desc, w_bufs, slot, bar, tile, (begin + slot) * DEPTH, HEIGHT, DEPTH, GATED)
    wait_for_last(PDL)
    for slot in range(early):
        tma_load(x_desc, [0, (begin + slot) * DEPTH], ready.index(slot), x_bufs.index(slot))
    for step in range(early, end - begin):
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        bar, depth = ready.index(slot), (begin + step) * DEPTH
        mbarrier.expect(bar, BYTES)
        _load_weights(w_desc, w_bufs, slot, bar, tile, depth, HEIGHT, DEPTH, GATED)
        tma_load(x_desc, [0, depth], bar, x_bufs.index(slot))


@gluon.jit
def _product(ring, count, GROUP: gl.constexpr, ROWS: gl.constexpr, HEIGHT: gl.constexpr, STAGES: gl.constexpr):
    """The sums [HEIGHT, ROWS] of ``count`` steps."""
    w_bufs, x_bufs, ready, empty = ring
    acc = gl.zeros((HEIGHT, ROWS), gl.float32,
                   gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, ROWS, 16]))
    for step in range(count):
        slot = step % STAGES
        mbarrier.wait(ready.index(slot), (step // STAGES) & 1)
        acc = warpgroup_mma(w_bufs.index(GROUPS * slot + GROUP), x_bufs.index(slot).permute((1, 0)), acc,
                            use_acc=step > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before has been read
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
    made = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
    return made


@gluon.jit
def _chunks(acc, HEIGHT: gl.constexpr, ROWS: gl.constexpr):
    """By rows, in a tuple of ``ROWS / CHUNK``."""
    if ROWS == CHUNK:
        chunks = (acc,)
    else:
        left, right = acc.reshape([HEIGHT, 2, ROWS // 2]).permute(0, 2, 1).split()
        chunks = _chunks(left, HEIGHT, ROWS // 2) + _chunks(right, HEIGHT, ROWS // 2)
    return chunks


@gluon.jit
def _activated(made, HEIGHT: gl.constexpr, DTYPE: gl.constexpr):
    """Of each 16 of the weight's rows the first 8 are gates. Rounded first: so a kernel behind would find them."""
    gate, up = made.reshape([HEIGHT // 16, 2, 8, CHUNK]).permute(0, 2, 3, 1).split()
    return silu_times(gate.to(DTYPE).to(gl.float32), up.to(DTYPE).to(gl.float32)).reshape([HEIGHT // 2, CHUNK])


@gluon.jit
def _store(out_desc, out, acc, column, HEIGHT: gl.constexpr, ROWS: gl.constexpr, TURN: gl.constexpr,
           GATED: gl.constexpr):
    """By the tensor memory accelerator, ``TURN`` rows at a time, once it has read what ``out`` held before."""
    chunks = _chunks(acc, HEIGHT, ROWS)
    for turn in gl.static_range(ROWS // TURN):
        tma.store_wait(0)
        barrier()
        for chunk in gl.static_range(TURN // CHUNK):
            made = chunks[turn * (TURN // CHUNK) + chunk]
            if GATED:
                made = _activated(made, HEIGHT, out_desc.dtype)
            out.slice(chunk * CHUNK, CHUNK, 0).store(made.to(out_desc.dtype).permute(1, 0))
        fence_async_shared()
        barrier()
        tma_store(out_desc, [turn * TURN, column], out)


@gluon.jit
def _multiply_tile(out_desc, out, ring, steps, tile, GROUP: gl.constexpr, ROWS: gl.constexpr, HEIGHT: gl.constexpr,
                   STAGES: gl.constexpr, TURN: gl.constexpr, GATED: gl.constexpr):
    """A multiplying group of a program with a whole tile."""
    acc = _product(ring, steps, GROUP, ROWS, HEIGHT, STAGES)
    _store(out_desc, out, acc, (tile * GROUPS + GROUP) * (HEIGHT // 2 if GATED else HEIGHT), HEIGHT, ROWS, TURN, GATED)
    tma.store_wait(0)


# Weights of other sizes compile nothing anew.
@gluon.jit(do_not_specialize=["steps"])
def _split_tile_kernel(w_desc, x_desc, out_desc, steps, ROWS: gl.constexpr, HEIGHT: gl.constexpr,
                       DEPTH: gl.constexpr, STAGES: gl.constexpr, TURN: gl.constexpr, GATED: gl.constexpr,
                       PDL: gl.constexpr):
    start_next(PDL)
    ring = _ring_of(x_desc, ROWS, HEIGHT, DEPTH, STAGES)
    outs = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, TURN, HEIGHT // 2 if GATED else HEIGHT],
                                     out_desc.layout)
    fence_async_shared()
    tile = gl.program_id(0)
    gl.warp_specialize([
        (_multiply_tile, (out_desc, outs.index(0), ring, steps, tile, gl.constexpr(0), ROWS, HEIGHT, STAGES, TURN,
                          GATED)),
        (_multiply_tile, (out_desc, outs.index(1), ring, steps, tile, gl.constexpr(1), ROWS, HEIGHT, STAGES, TURN,
                          GATED)),
        (_load_all, (w_desc, x_desc, ring, tile, 0, steps, ROWS, HEIGHT, DEPTH, STAGES, GATED, PDL)),
    ], [4, 1], [232, 40])


@gluon.jit
def _multiply_piece(part_desc, ring, count, row, column, GROUP: gl.constexpr, ROWS: gl.constexpr,
                    HEIGHT: gl.constexpr, STAGES: gl.constexpr):
    """A multiplying group of a program with one piece; what it leaves goes through shared memory that held rows."""
    acc = _product(ring, count, GROUP, ROWS, HEIGHT, STAGES)
    chunks = _chunks(acc, HEIGHT, ROWS)
    HALF: gl.constexpr = ROWS // 2
    for half in gl.static_range(2):
        slot = 2 * GROUP + half
        mbarrier.wait(ring[3].index(slot), ((count - slot + STAGES - 1) // STAGES - 1) & 1)  # both groups have read it
        out = reinterpret(ring[1].index(slot), part_desc.dtype, [HALF, HEIGHT], part_desc.layout)
        for chunk in gl.static_range(HALF // CHUNK):
            made = chunks[half * (HALF // CHUNK) + chunk].to(part_desc.dtype)
            out.slice(chunk * CHUNK, CHUNK, 0).store(made.permute(1, 0))
        fence_async_shared()
        barrier()
        tma_store(part_desc, [row + half * HALF, column + GROUP * HEIGHT], out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["steps"])
def _split_piece_kernel(w_desc, x_desc, part_desc, steps, ROWS: gl.constexpr, HEIGHT: gl.constexpr,
                        DEPTH: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr, PDL: gl.constexpr):
    start_next(PDL)
    ring = _ring_of(x_desc, ROWS, HEIGHT, DEPTH, STAGES)
    fence_async_shared()
    tile, piece = gl.program_id(0) // PIECES, gl.program_id(0) % PIECES
    begin, end = piece * steps // PIECES, (piece + 1) * steps // PIECES
    row, column = piece * ROWS, tile * (GROUPS * HEIGHT)
    gl.warp_specialize([
        (_multiply_piece, (part_desc, ring, end - begin, row, column, gl.constexpr(0), ROWS, HEIGHT, STAGES)),
        (_multiply_piece, (part_desc, ring, end - begin, row, column, gl.constexpr(1), ROWS, HEIGHT, STAGES)),
        (_load_all, (w_desc, x_desc, ring, tile, begin, end, ROWS, HEIGHT, DEPTH, STAGES, gl.constexpr(False), PDL)),
    ], [4, 1], [232, 40])


@gluon.jit
def _ring_of(x_desc, ROWS: gl.constexpr, HEIGHT: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr):
    w_bufs = gl.allocate_shared_memory(x_desc.dtype, [GROUPS * STAGES, HEIGHT, DEPTH], x_desc.layout)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, DEPTH], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    return w_bufs, x_bufs, ready, empty


def split_matmul(x: torch.Tensor, weight: torch.Tensor, tile: SplitKTile, *, gated: bool = False) -> torch.Tensor:
    """``x`` [T, in] ``@ weight`` [out, in] ``.T``: ``[T, out]``; or, ``gated``, ``silu_and_mul`` of that,
    ``[T, out / 2]``. In 16 bits; T is at most ``tile.rows``, ``in`` a multiple of ``tile.depth``, ``out`` of 16."""
    out, width = weight.shape
    _check(x, weight, tile)
    y = torch.empty((len(x), out // 2 if gated else out), dtype=x.dtype, device=x.device)
    high, turn = (tile.height // 2, tile.rows) if gated else (tile.height, tile.rows // 2)
    _split_tile_kernel[(-(-out // tile.high),)](
        _eights(weight, tile) if gated else tiles_of(weight, tile.height, tile.depth),
        tiles_of(x, tile.rows, tile.depth), tiles_of(y, turn, high), width // tile.depth, ROWS=tile.rows,
        HEIGHT=tile.height, DEPTH=tile.depth, STAGES=tile.stages, TURN=turn, GATED=gated, num_warps=4,
        maxnreg=REGISTERS_AT_START, **pdl(x))
    return y


def split_pieces(x: torch.Tensor, weight: torch.Tensor, tile: SplitKTile,
                 dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``[pieces, tile.rows, out]`` of ``dtype``, whose sum is ``x @ weight.T`` with rows behind T that say nothing: for
    a kernel that reads the product anyway. Else as ``split_matmul``, by tiles 64 high of four stages or more."""
    out, width = weight.shape
    _check(x, weight, tile)
    assert tile.height == 64 and tile.stages >= 4 and width // tile.depth >= tile.pieces
    parts = torch.empty((tile.pieces, tile.rows, out), dtype=dtype, device=x.device)
    _split_piece_kernel[(-(-out // tile.high) * tile.pieces,)](
        tiles_of(weight, tile.height, tile.depth), tiles_of(x, tile.rows, tile.depth),
        tiles_of(parts.view(-1, out), tile.rows // 2, tile.height), width // tile.depth, ROWS=tile.rows,
        HEIGHT=tile.height, DEPTH=tile.depth, STAGES=tile.stages, PIECES=tile.pieces, num_warps=4,
        maxnreg=REGISTERS_AT_START, **pdl(x))
    return parts


def _check(x: torch.Tensor, weight: torch.Tensor, tile: SplitKTile) -> None:
    out, width = weight.shape
    assert len(x) <= tile.rows and not width % tile.depth and not out % 16 and x.stride(1) == 1


def _eights(weight: torch.Tensor, tile: SplitKTile) -> TensorDescriptor:
    """Eight gates, the eight ups beside them, the next eight gates: rows of the tensor memory accelerator's tiles."""
    out, width = weight.shape
    layout = gl.NVMMASharedLayout(min(128, tile.depth * weight.itemsize), 8 * weight.itemsize, 4)
    return TensorDescriptor(weight, [out // 16, 2, 8, width], [8 * width, out // 2 * width, width, 1],
                            [tile.height // 16, 2, 8, tile.depth], layout)
