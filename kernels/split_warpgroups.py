"""Product of 65 to 256 rows with a weight on a Hopper GPU: each weight is read once, and all multiprocessors have
equal work.

A tile is all the rows beside ``groups * height`` of the weight's: so many outputs have too few tiles for whole ones to
go round. So a program takes a share of all tiles' steps of depth. Either shares are longer than a tile, which then lies
in two of them at most: the program behind begins with the tile's end, leaves that, and the one that ends with the
tile's beginning adds it. Or a tile is ``pieces`` programs' work: each leaves its sums, and when all are there each
adds up its part of the rows. Sums are joined in the same order always.

A program is a warp that loads and groups of four warps that multiply, 64 or 128 of the weight's rows each: the weight
is the tensor cores' left side, for its rows are as many as one likes. Loads run ``stages`` steps ahead, and the first
ones' weights are asked for before the kernel ahead has made the rows.

Gates and ups that end in the activation are loaded by eights, for both are then in the same thread.

Written in Gluon; ``reference.skinny_matmul`` is the twin on a CPU (tests/gpu/test_split_warpgroups.py compares).
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

from ._triton import pdl, start_next, wait_for_last
from .last_piece import counts_of
from .silu_and_mul import silu_times
from .split_tiles import SplitTile

CHUNK = gl.constexpr(64)
"""Rows that are stored at a time."""


@gluon.jit
def _load_weights(w_desc, w_bufs, slot, bar, tile, depth, GROUPS: gl.constexpr, HEIGHT: gl.constexpr,
                  DEPTH: gl.constexpr, GATED: gl.constexpr):
    for group in gl.static_range(GROUPS):
        buf = w_bufs.index(GROUPS * slot + group)
        if GATED:
            eights = buf._reinterpret(w_desc.dtype, [HEIGHT // 16, 2, 8, DEPTH], w_desc.layout)
            tma.async_copy_global_to_shared(w_desc, [(tile * GROUPS + group) * (HEIGHT // 16), 0, 0, depth], bar,
                                            eights)
        else:
            tma.async_copy_global_to_shared(w_desc, [(tile * GROUPS + group) * HEIGHT, depth], bar, buf)


@gluon.jit
def _load_all(w_desc, x_desc, ring, steps, begin, end, ROWS: gl.constexpr, GROUPS: gl.constexpr,
              HEIGHT: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
              PDL: gl.constexpr):
    """The loading warp."""
    BYTES: gl.constexpr = (GROUPS * HEIGHT + ROWS) * DEPTH * 2
    w_bufs, x_bufs, ready, empty = ring
    early = gl.minimum(end - begin, STAGES)
    for slot in range(early):
        at = begin + slot
        bar = ready.index(slot)
        mbarrier.expect(bar, BYTES)
        _load_weights(w_desc, w_bufs, slot, bar, at // steps, at % steps * DEPTH, GROUPS, HEIGHT, DEPTH, GATED)
    wait_for_last(PDL)
    for slot in range(early):
        tma.async_copy_global_to_shared(x_desc, [0, (begin + slot) % steps * DEPTH], ready.index(slot),
                                        x_bufs.index(slot))
    for step in range(early, end - begin):
        at = begin + step
        slot = step % STAGES
        mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
        bar = ready.index(slot)
        mbarrier.expect(bar, BYTES)
        _load_weights(w_desc, w_bufs, slot, bar, at // steps, at % steps * DEPTH, GROUPS, HEIGHT, DEPTH, GATED)
        tma.async_copy_global_to_shared(x_desc, [0, at % steps * DEPTH], bar, x_bufs.index(slot))


@gluon.jit
def _product(ring, step, count, GROUP: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, HEIGHT: gl.constexpr,
             STAGES: gl.constexpr):
    """``[HEIGHT, ROWS]`` of ``count`` steps."""
    w_bufs, x_bufs, ready, empty = ring
    # ptxas refuses 256 rows at once where three groups leave a thread 128 registers at its start.
    AT_ONCE: gl.constexpr = 128 if GROUPS == 3 else ROWS
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, AT_ONCE, 16])
    acc = gl.zeros((HEIGHT, ROWS), gl.float32, layout)
    for i in range(count):
        slot = (step + i) % STAGES
        mbarrier.wait(ready.index(slot), ((step + i) // STAGES) & 1)
        acc = warpgroup_mma(w_bufs.index(GROUPS * slot + GROUP), x_bufs.index(slot).permute((1, 0)), acc,
                            use_acc=i > 0, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before has been read
        mbarrier.arrive(empty.index((step + i + STAGES - 1) % STAGES), pred=i > 0)
    made = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((step + count + STAGES - 1) % STAGES))
    return made


@gluon.jit
def _chunks(acc, HEIGHT: gl.constexpr, ROWS: gl.constexpr):
    """By rows, in a tuple of ``ROWS / CHUNK``."""
    if ROWS == 64:
        chunks = (acc,)
    else:
        left, right = acc.reshape([HEIGHT, 2, ROWS // 2]).permute(0, 2, 1).split()
        chunks = _chunks(left, HEIGHT, ROWS // 2) + _chunks(right, HEIGHT, ROWS // 2)
    return chunks


@gluon.jit
def _places(made, chunk, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, ROWS: gl.constexpr):
    """Of a chunk's values, which ``made`` are or will be, among those that a group leaves."""
    height = gl.arange(0, HEIGHT, gl.SliceLayout(1, made.type.layout))
    row = gl.arange(0, WIDTH, gl.SliceLayout(0, made.type.layout))
    return height[:, None] * ROWS + row[None, :] + chunk * WIDTH


@gluon.jit
def _store(out_desc, outs, made, row, column, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, GATED: gl.constexpr):
    """A chunk's ``[HEIGHT, WIDTH]`` as ``WIDTH`` rows; GATED, of each 16 the first 8 are gates."""
    if GATED:
        gate, up = made.reshape([HEIGHT // 16, 2, 8, WIDTH]).permute(0, 2, 3, 1).split()
        gate = gate.to(out_desc.dtype).to(gl.float32)  # as a kernel behind would find them
        up = up.to(out_desc.dtype).to(gl.float32)
        made = silu_times(gate, up).reshape([HEIGHT // 2, WIDTH])
    tma.store_wait(0)
    gl.thread_barrier()
    outs.store(made.to(out_desc.dtype).permute(1, 0))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out_desc, [row, column], outs)


@gluon.jit
def _leave(acc, at, HEIGHT: gl.constexpr, ROWS: gl.constexpr):
    chunks = _chunks(acc, HEIGHT, ROWS)
    for chunk in gl.static_range(ROWS // CHUNK):
        gl.store(at + _places(chunks[chunk], chunk, HEIGHT, CHUNK, ROWS), chunks[chunk])


@gluon.jit
def _leave_rows(acc, at, out, HEIGHT: gl.constexpr, ROWS: gl.constexpr):
    """As rows of ``out`` values: eight of a row are beside each other, as many as memory wants."""
    chunks = _chunks(acc, HEIGHT, ROWS)
    for chunk in gl.static_range(ROWS // CHUNK):
        column = gl.arange(0, HEIGHT, gl.SliceLayout(1, chunks[chunk].type.layout))
        row = gl.arange(0, CHUNK, gl.SliceLayout(0, chunks[chunk].type.layout)) + chunk * CHUNK
        gl.store(at + row[None, :] * out + column[:, None], chunks[chunk])


@gluon.jit
def _spin(count_at, COUNT: gl.constexpr):
    seen = gl.atomic_add(count_at, 0, sem="acquire")
    while seen < COUNT:
        seen = gl.atomic_add(count_at, 0, sem="acquire")
    gl.thread_barrier()


@gluon.jit
def _multiply_shares(out_desc, outs, ring, part_ptr, count_ptr, steps, share, begin, end, GROUP: gl.constexpr,
                     ROWS: gl.constexpr, GROUPS: gl.constexpr, HEIGHT: gl.constexpr, STAGES: gl.constexpr,
                     GATED: gl.constexpr):
    """A multiplying group, where a tile lies in two shares at most: its end is the first work of one."""
    WIDE: gl.constexpr = HEIGHT // 2 if GATED else HEIGHT
    at = begin
    while at < end:
        tile = at // steps
        first = at - tile * steps
        count = gl.minimum(steps - first, end - at)
        acc = _product(ring, at - begin, count, GROUP, ROWS, GROUPS, HEIGHT, STAGES)
        place = share * GROUPS + GROUP
        if first > 0:
            _leave(acc, part_ptr + place * (HEIGHT * ROWS), HEIGHT, ROWS)
            gl.thread_barrier()
            gl.atomic_add(count_ptr + place, 1, sem="release")
        else:
            parted = count < steps
            other = place + GROUPS
            if parted:
                _spin(count_ptr + other, 1)
                gl.store(count_ptr + other, 0)
            chunks = _chunks(acc, HEIGHT, ROWS)
            for chunk in gl.static_range(ROWS // CHUNK):
                made = chunks[chunk]
                left_at = part_ptr + other * (HEIGHT * ROWS) + _places(made, chunk, HEIGHT, CHUNK, ROWS)
                made += gl.load(left_at, mask=parted, other=0.0, cache_modifier=".cg")
                _store(out_desc, outs, made, chunk * CHUNK, (tile * GROUPS + GROUP) * WIDE, HEIGHT, CHUNK, GATED)
        at += count
    tma.store_wait(0)


@gluon.jit
def _multiply_piece(out_desc, outs, ring, part_ptr, count_ptr, share, begin, end, GROUP: gl.constexpr,
                    ROWS: gl.constexpr, GROUPS: gl.constexpr, HEIGHT: gl.constexpr, STAGES: gl.constexpr,
                    GATED: gl.constexpr, PIECES: gl.constexpr, WIDTH: gl.constexpr):
    """A multiplying group, where a tile is ``PIECES`` programs' work, of which each ends ``WIDTH`` rows at a time."""
    WIDE: gl.constexpr = HEIGHT // 2 if GATED else HEIGHT
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    acc = _product(ring, 0, end - begin, GROUP, ROWS, GROUPS, HEIGHT, STAGES)
    tile = share // PIECES
    _leave(acc, part_ptr + (share * GROUPS + GROUP) * (HEIGHT * ROWS), HEIGHT, ROWS)
    gl.thread_barrier()
    count_at = count_ptr + tile * GROUPS + GROUP
    gl.atomic_add(count_at, 1, sem="release")
    _spin(count_at, PIECES)
    for chunk in range(share % PIECES, ROWS // WIDTH, PIECES):
        made = gl.zeros((HEIGHT, WIDTH), gl.float32, layout)
        places = part_ptr + _places(made, chunk, HEIGHT, WIDTH, ROWS)
        for piece in gl.static_range(PIECES):
            left_at = places + ((tile * PIECES + piece) * GROUPS + GROUP) * (HEIGHT * ROWS)
            made += gl.load(left_at, cache_modifier=".cg")
        _store(out_desc, outs, made, chunk * WIDTH, (tile * GROUPS + GROUP) * WIDE, HEIGHT, WIDTH, GATED)
    if gl.atomic_add(count_at, 1, sem="relaxed") == 2 * PIECES - 1:
        gl.store(count_at, 0)  # nobody looks at it any more
    tma.store_wait(0)


@gluon.jit
def _multiply_left(ring, part_ptr, out, share, begin, end, GROUP: gl.constexpr, ROWS: gl.constexpr,
                   GROUPS: gl.constexpr, HEIGHT: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr):
    """A multiplying group, where whatever follows adds the pieces up."""
    acc = _product(ring, 0, end - begin, GROUP, ROWS, GROUPS, HEIGHT, STAGES)
    column = (share // PIECES * GROUPS + GROUP) * HEIGHT
    if column < out:
        _leave_rows(acc, part_ptr + share % PIECES * (ROWS * out) + column, out, HEIGHT, ROWS)


@gluon.jit
def _multiply(out_desc, outs, ring, part_ptr, count_ptr, out, steps, share, begin, end, GROUP: gl.constexpr,
              ROWS: gl.constexpr, GROUPS: gl.constexpr, HEIGHT: gl.constexpr, STAGES: gl.constexpr,
              GATED: gl.constexpr, PIECES: gl.constexpr, WIDTH: gl.constexpr):
    if out_desc is None:
        _multiply_left(ring, part_ptr, out, share, begin, end, GROUP, ROWS, GROUPS, HEIGHT, STAGES, PIECES)
    elif PIECES > 1:
        _multiply_piece(out_desc, outs.index(GROUP), ring, part_ptr, count_ptr, share, begin, end, GROUP, ROWS,
                        GROUPS, HEIGHT, STAGES, GATED, PIECES, WIDTH)
    else:
        _multiply_shares(out_desc, outs.index(GROUP), ring, part_ptr, count_ptr, steps, share, begin, end, GROUP,
                         ROWS, GROUPS, HEIGHT, STAGES, GATED)


# Weights of other sizes compile nothing anew.
@gluon.jit(do_not_specialize=["steps", "tiles"])
def _split_warpgroups_kernel(w_desc, x_desc, out_desc, part_ptr, count_ptr, out, steps, tiles, ROWS: gl.constexpr,
                             GROUPS: gl.constexpr, HEIGHT: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
                             GATED: gl.constexpr, PIECES: gl.constexpr, WIDTH: gl.constexpr, PDL: gl.constexpr):
    start_next(PDL)
    w_bufs = gl.allocate_shared_memory(x_desc.dtype, [GROUPS * STAGES, HEIGHT, DEPTH], x_desc.layout)
    x_bufs = gl.allocate_shared_memory(x_desc.dtype, [STAGES, ROWS, DEPTH], x_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    fence_async_shared()
    ring = (w_bufs, x_bufs, ready, empty)
    outs = w_bufs  # pieces are left without
    if out_desc is not None:
        outs = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, WIDTH, HEIGHT // 2 if GATED else HEIGHT],
                                         out_desc.layout)
    # Programs start in their order: one that waits for another's end of a tile waits for one that started before.
    share = gl.num_programs(0) - 1 - gl.program_id(0)
    begin = share * (tiles * steps) // gl.num_programs(0)
    end = (share + 1) * (tiles * steps) // gl.num_programs(0)
    if GROUPS == 3:
        gl.warp_specialize([
            (_multiply, (out_desc, outs, ring, part_ptr, count_ptr, out, steps, share, begin, end,
                         gl.constexpr(0), ROWS, GROUPS, HEIGHT, STAGES, GATED, PIECES, WIDTH)),
            (_multiply, (out_desc, outs, ring, part_ptr, count_ptr, out, steps, share, begin, end,
                         gl.constexpr(1), ROWS, GROUPS, HEIGHT, STAGES, GATED, PIECES, WIDTH)),
            (_multiply, (out_desc, outs, ring, part_ptr, count_ptr, out, steps, share, begin, end,
                         gl.constexpr(2), ROWS, GROUPS, HEIGHT, STAGES, GATED, PIECES, WIDTH)),
            (_load_all, (w_desc, x_desc, ring, steps, begin, end, ROWS, GROUPS, HEIGHT, DEPTH, STAGES, GATED,
                         PDL)),
        ], [4, 4, 4], [160, 160, 32])
    else:
        gl.warp_specialize([
            (_multiply, (out_desc, outs, ring, part_ptr, count_ptr, out, steps, share, begin, end,
                         gl.constexpr(0), ROWS, GROUPS, HEIGHT, STAGES, GATED, PIECES, WIDTH)),
            (_multiply, (out_desc, outs, ring, part_ptr, count_ptr, out, steps, share, begin, end,
                         gl.constexpr(1), ROWS, GROUPS, HEIGHT, STAGES, GATED, PIECES, WIDTH)),
            (_load_all, (w_desc, x_desc, ring, steps, begin, end, ROWS, GROUPS, HEIGHT, DEPTH, STAGES, GATED,
                         PDL)),
        ], [4, 4], [232, 40])


def split_matmul(x: torch.Tensor, weight: torch.Tensor, tile: SplitTile, *, gated: bool = False) -> torch.Tensor:
    """``x`` [T, in] ``@ weight`` [out, in] ``.T``: ``[T, out]``; or, ``gated``, ``silu_and_mul`` of that,
    ``[T, out / 2]``. In 16 bits; T is at most ``tile.rows``, ``in`` a multiple of ``tile.depth``, ``out`` of 16."""
    y = torch.empty((len(x), len(weight) // 2 if gated else len(weight)), dtype=x.dtype, device=x.device)
    tiles, programs = _programs(weight, tile)
    assert programs <= tile.programs  # those that wait for each other are all there
    parts = torch.empty((programs, tile.high, tile.rows), dtype=torch.float32, device=x.device)
    wide = tile.height // 2 if gated else tile.height
    _launch(x, weight, tile, _descriptor(y, [tile.chunk, wide]), parts, tiles, programs, gated)
    return y


def split_pieces(x: torch.Tensor, weight: torch.Tensor, tile: SplitTile) -> torch.Tensor:
    """``[pieces, tile.rows, out]`` float32, whose sum is ``x @ weight.T`` with rows behind T that say nothing: for a
    kernel that reads the product anyway. ``out`` is a multiple of ``tile.height``, else as ``split_matmul``."""
    assert not len(weight) % tile.height
    tiles, programs = _programs(weight, tile)
    parts = torch.empty((tile.pieces, tile.rows, len(weight)), dtype=torch.float32, device=x.device)
    _launch(x, weight, tile, None, parts, tiles, programs, False)
    return parts


def _programs(weight: torch.Tensor, tile: SplitTile) -> tuple[int, int]:
    """``(tiles, programs)``"""
    tiles = -(-len(weight) // tile.high)
    return tiles, tiles * tile.pieces if tile.pieces > 1 else min(tile.programs, tiles)


def _launch(x: torch.Tensor, weight: torch.Tensor, tile: SplitTile, out_desc: TensorDescriptor | None,
            parts: torch.Tensor, tiles: int, programs: int, gated: bool) -> None:
    out, width = weight.shape
    assert len(x) <= tile.rows and not width % tile.depth and not out % 16 and x.stride(1) == 1
    _split_warpgroups_kernel[(programs,)](
        _eights(weight, tile) if gated else _descriptor(weight, [tile.height, tile.depth]),
        _descriptor(x, [tile.rows, tile.depth]), out_desc, parts, counts_of(x.device), out, width // tile.depth, tiles,
        ROWS=tile.rows, GROUPS=tile.groups, HEIGHT=tile.height, DEPTH=tile.depth, STAGES=tile.stages, GATED=gated,
        PIECES=tile.pieces, WIDTH=tile.chunk, num_warps=4, maxnreg=128 if tile.groups == 3 else 168, **pdl(x))


def _descriptor(matrix: torch.Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(min(128, block[-1] * matrix.itemsize), 8 * matrix.itemsize, 2)
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), block, layout)


def _eights(weight: torch.Tensor, tile: SplitTile) -> TensorDescriptor:
    """Eight gates, the eight ups beside them, the next eight gates: rows of the tensor memory accelerator's tiles."""
    out, width = weight.shape
    layout = gl.NVMMASharedLayout(min(128, tile.depth * weight.itemsize), 8 * weight.itemsize, 4)
    return TensorDescriptor(weight, [out // 16, 2, 8, width], [8 * width, out // 2 * width, width, 1],
                            [tile.height // 16, 2, 8, tile.depth], layout)
