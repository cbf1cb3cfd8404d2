"""Multiplies 65 to 256 rows with a weight on a Hopper GPU: each weight is read once.

A tile is all the rows by ``2 * height`` of the weight's, and one program's work. Where there are few tiles, ``splits``
programs share each (split-K) and leave their partial sums to a kernel that reads the product anyway. Sums are always
added in the same order.

A program is a warp that loads and two groups of four that multiply, each 64 or 128 of the weight's rows: the weight is
the tensor cores' left operand, whose rows are many. Loads run ``stages`` steps ahead, and the first weights are
requested before the previous kernel has made the rows.

Gates and ups that end in the activation are loaded eight by eight, so that both are in the same thread.

Written in Gluon; ``linear`` is the twin (tests/gpu/kernels/test_split_k_warp_specialized.py compares).
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
from ..tuning.gemm import SplitKTile
from .tma_tiles import tma_descriptor

GROUPS = gl.constexpr(2)
CHUNK = gl.constexpr(64)
"""Rows that a group transposes at a time."""
REGISTERS_AT_START = 168
"""Registers of each of 384 threads; then groups that multiply have 232 and the one that loads 40."""


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
    """Runs the loading warp, for a tile's steps from ``begin`` to ``end``."""
    BYTES: gl.constexpr = (GROUPS * HEIGHT + ROWS) * DEPTH * 2
    w_bufs, x_bufs, ready, empty = ring
    first_steps = gl.minimum(end - begin, STAGES)
    for slot in range(first_steps):
        bar = ready.index(slot)
        mbarrier.expect(bar, BYTES)
        _load_weights(w_desc, w_bufs, slot, bar, tile, (begin + slot) * DEPTH, HEIGHT, DEPTH, GATED)
    wait_for_last(PDL)
    for slot in range(first_steps):
        tma_load(x_desc, [0, (begin + slot) * DEPTH], ready.index(slot), x_bufs.index(slot))
    for step in range(first_steps, end - begin):
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
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the previous step has been read
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=step > 0)
    sums = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
    return sums


@gluon.jit
def _chunks(acc, HEIGHT: gl.constexpr, ROWS: gl.constexpr):
    """Cuts [HEIGHT, ROWS] by rows into a tuple of ``ROWS / CHUNK``."""
    if ROWS == CHUNK:
        chunks = (acc,)
    else:
        left, right = acc.reshape([HEIGHT, 2, ROWS // 2]).permute(0, 2, 1).split()
        chunks = _chunks(left, HEIGHT, ROWS // 2) + _chunks(right, HEIGHT, ROWS // 2)
    return chunks


@gluon.jit
def _activated(sums, HEIGHT: gl.constexpr, DTYPE: gl.constexpr):
    """Applies the activation: the first 8 of each 16 of the weight's rows are gates. The sums are rounded first, since
    a separate kernel would read rounded ones."""
    gate, up = sums.reshape([HEIGHT // 16, 2, 8, CHUNK]).permute(0, 2, 3, 1).split()
    return silu_times(gate.to(DTYPE).to(gl.float32), up.to(DTYPE).to(gl.float32)).reshape([HEIGHT // 2, CHUNK])


@gluon.jit
def _store(out_desc, out, acc, column, HEIGHT: gl.constexpr, ROWS: gl.constexpr, STORE_ROWS: gl.constexpr,
           GATED: gl.constexpr):
    """Stores by TMA, ``STORE_ROWS`` rows at a time, once it has read the previous content of ``out``."""
    chunks = _chunks(acc, HEIGHT, ROWS)
    for part in gl.static_range(ROWS // STORE_ROWS):
        tma.store_wait(0)
        barrier()
        for chunk in gl.static_range(STORE_ROWS // CHUNK):
            sums = chunks[part * (STORE_ROWS // CHUNK) + chunk]
            if GATED:
                sums = _activated(sums, HEIGHT, out_desc.dtype)
            out.slice(chunk * CHUNK, CHUNK, 0).store(sums.to(out_desc.dtype).permute(1, 0))
        fence_async_shared()
        barrier()
        tma_store(out_desc, [part * STORE_ROWS, column], out)


@gluon.jit
def _multiply_tile(out_desc, out, ring, steps, tile, GROUP: gl.constexpr, ROWS: gl.constexpr, HEIGHT: gl.constexpr,
                   STAGES: gl.constexpr, STORE_ROWS: gl.constexpr, GATED: gl.constexpr):
    """Runs a multiplying group of a program with a whole tile."""
    acc = _product(ring, steps, GROUP, ROWS, HEIGHT, STAGES)
    _store(out_desc, out, acc, (tile * GROUPS + GROUP) * (HEIGHT // 2 if GATED else HEIGHT), HEIGHT, ROWS, STORE_ROWS,
           GATED)
    tma.store_wait(0)


# Weights of other sizes must not recompile the kernel.
@gluon.jit(do_not_specialize=["steps"])
def _split_k_tile_kernel(w_desc, x_desc, out_desc, steps, ROWS: gl.constexpr, HEIGHT: gl.constexpr, DEPTH: gl.constexpr,
                         STAGES: gl.constexpr, STORE_ROWS: gl.constexpr, GATED: gl.constexpr, PDL: gl.constexpr):
    start_next(PDL)
    ring = _ring_of(x_desc, ROWS, HEIGHT, DEPTH, STAGES)
    outs = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, STORE_ROWS, HEIGHT // 2 if GATED else HEIGHT],
                                     out_desc.layout)
    fence_async_shared()
    tile = gl.program_id(0)
    gl.warp_specialize([
        (_multiply_tile, (out_desc, outs.index(0), ring, steps, tile, gl.constexpr(0), ROWS, HEIGHT, STAGES, STORE_ROWS,
                          GATED)),
        (_multiply_tile, (out_desc, outs.index(1), ring, steps, tile, gl.constexpr(1), ROWS, HEIGHT, STAGES, STORE_ROWS,
                          GATED)),
        (_load_all, (w_desc, x_desc, ring, tile, 0, steps, ROWS, HEIGHT, DEPTH, STAGES, GATED, PDL)),
    ], [4, 1], [232, 40])


@gluon.jit
def _multiply_split(partial_desc, ring, count, row, column, GROUP: gl.constexpr, ROWS: gl.constexpr,
                    HEIGHT: gl.constexpr, STAGES: gl.constexpr):
    """Runs a multiplying group of a program with one split; its partial sums reuse the shared memory of rows."""
    acc = _product(ring, count, GROUP, ROWS, HEIGHT, STAGES)
    chunks = _chunks(acc, HEIGHT, ROWS)
    HALF: gl.constexpr = ROWS // 2
    for half in gl.static_range(2):
        slot = 2 * GROUP + half
        # Both groups have read it.
        mbarrier.wait(ring[3].index(slot), ((count - slot + STAGES - 1) // STAGES - 1) & 1)
        out = reinterpret(ring[1].index(slot), partial_desc.dtype, [HALF, HEIGHT], partial_desc.layout)
        for chunk in gl.static_range(HALF // CHUNK):
            sums = chunks[half * (HALF // CHUNK) + chunk].to(partial_desc.dtype)
            out.slice(chunk * CHUNK, CHUNK, 0).store(sums.permute(1, 0))
        fence_async_shared()
        barrier()
        tma_store(partial_desc, [row + half * HALF, column + GROUP * HEIGHT], out)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["steps"])
def _split_k_partial_kernel(w_desc, x_desc, partial_desc, steps, ROWS: gl.constexpr, HEIGHT: gl.constexpr,
                            DEPTH: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, PDL: gl.constexpr):
    start_next(PDL)
    ring = _ring_of(x_desc, ROWS, HEIGHT, DEPTH, STAGES)
    fence_async_shared()
    tile, split = gl.program_id(0) // SPLITS, gl.program_id(0) % SPLITS
    begin, end = split * steps // SPLITS, (split + 1) * steps // SPLITS
    row, column = split * ROWS, tile * (GROUPS * HEIGHT)
    gl.warp_specialize([
        (_multiply_split, (partial_desc, ring, end - begin, row, column, gl.constexpr(0), ROWS, HEIGHT, STAGES)),
        (_multiply_split, (partial_desc, ring, end - begin, row, column, gl.constexpr(1), ROWS, HEIGHT, STAGES)),
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


def split_k_matmul(x: torch.Tensor, weight: torch.Tensor, tile: SplitKTile, *, gated: bool = False) -> torch.Tensor:
    """``x`` [T, in] ``@ weight`` [out, in] ``.T``: ``[T, out]``; or, ``gated``, ``silu_and_mul`` of that,
    ``[T, out / 2]``. In 16 bits; T is at most ``tile.rows``, ``in`` a multiple of ``tile.depth``, ``out`` of 16."""
    out, width = weight.shape
    _check(x, weight, tile)
    y = torch.empty((len(x), out // 2 if gated else out), dtype=x.dtype, device=x.device)
    high, store_rows = (tile.height // 2, tile.rows) if gated else (tile.height, tile.rows // 2)
    _split_k_tile_kernel[(-(-out // tile.weight_rows),)](
        _interleaved_by_eights(weight, tile) if gated else tma_descriptor(weight, tile.height, tile.depth),
        tma_descriptor(x, tile.rows, tile.depth), tma_descriptor(y, store_rows, high), width // tile.depth,
        ROWS=tile.rows, HEIGHT=tile.height, DEPTH=tile.depth, STAGES=tile.stages, STORE_ROWS=store_rows, GATED=gated,
        num_warps=4, maxnreg=REGISTERS_AT_START, **pdl(x))
    return y


def split_k_partials(x: torch.Tensor, weight: torch.Tensor, tile: SplitKTile,
                     dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """``[splits, tile.rows, out]`` of ``dtype``, whose sum is ``x @ weight.T``; rows after T are arbitrary. A kernel
    that reads the product anyway adds them up. Else as ``split_k_matmul``, by tiles 64 high of four stages or more."""
    out, width = weight.shape
    _check(x, weight, tile)
    assert tile.height == 64 and tile.stages >= 4 and width // tile.depth >= tile.splits
    partials = torch.empty((tile.splits, tile.rows, out), dtype=dtype, device=x.device)
    _split_k_partial_kernel[(-(-out // tile.weight_rows) * tile.splits,)](
        tma_descriptor(weight, tile.height, tile.depth), tma_descriptor(x, tile.rows, tile.depth),
        tma_descriptor(partials.view(-1, out), tile.rows // 2, tile.height), width // tile.depth, ROWS=tile.rows,
        HEIGHT=tile.height, DEPTH=tile.depth, STAGES=tile.stages, SPLITS=tile.splits, num_warps=4,
        maxnreg=REGISTERS_AT_START, **pdl(x))
    return partials


def _check(x: torch.Tensor, weight: torch.Tensor, tile: SplitKTile) -> None:
    out, width = weight.shape
    assert len(x) <= tile.rows and not width % tile.depth and not out % 16 and x.stride(1) == 1


def _interleaved_by_eights(weight: torch.Tensor, tile: SplitKTile) -> TensorDescriptor:
    """Describes a weight whose tiles have eight gates, their eight ups, the next eight gates, and so on, as rows."""
    out, width = weight.shape
    layout = gl.NVMMASharedLayout(min(128, tile.depth * weight.itemsize), 8 * weight.itemsize, 4)
    return TensorDescriptor(weight, [out // 16, 2, 8, width], [8 * width, out // 2 * width, width, 1],
                            [tile.height // 16, 2, 8, tile.depth], layout)
