"""Shares the tiles of a grouped product among persistent programs: each takes the next one that is free.

``work`` is ``(rows, spans, choices in all, number of spans, column blocks, band)`` of a ``moe_align.Alignment`` with
blocks of 64 rows. ``scheduler`` is the counter in global memory, and the shared memory and barriers by which the
loading group passes tiles to the others.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .._gluon import async_load
from ..device import num_sms

STEP_BYTES = gl.constexpr(128)
"""Depth of a step: as wide as TMA's swizzle."""
REGISTERS_AT_START = 168
"""Registers of each of 384 threads; then the groups that multiply have more, and the one that loads fewer."""


@gluon.jit
def tile_at(tile, work, COLUMNS: gl.constexpr):
    """``(first row, first column, expert, blocks of 64 rows)``; after the last tile the expert is -1.

    A band of spans, before the next columns, keeps an expert's matrix cached."""
    spans_ptr, num_spans, column_blocks, band = work[1], work[3], work[4], work[5]
    inside = tile < num_spans * column_blocks
    first = tile // (band * column_blocks) * band
    height = gl.maximum(gl.minimum(num_spans - first, band), 1)
    within = tile - first * column_blocks
    span = spans_ptr + (first + within % height) * 3
    block = gl.load(span, mask=inside, other=0)
    blocks = gl.load(span + 1, mask=inside, other=0)
    expert = gl.load(span + 2, mask=inside, other=-1)
    return block * 64, within // height * COLUMNS, expert, blocks


@gluon.jit
def take_next_tile(scheduler, iteration, work):
    """Takes the next free tile and passes it to the multiplying groups. The program that takes the last one resets the
    counter to zero for the next product."""
    next_ptr, tiles_smem, sent, received = scheduler
    taken = gl.atomic_add(next_ptr, 1, sem="relaxed")
    if taken == work[3] * work[4] - 1:
        gl.store(next_ptr, 0)
    tile = taken + gl.num_programs(0)
    mbarrier.wait(received.index(iteration % 2), ((iteration // 2) & 1) ^ 1)
    tiles_smem.index(iteration % 2).store(gl.full([32], tile, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(sent.index(iteration % 2))
    return tile


@gluon.jit
def receive_tile(scheduler, iteration):
    next_ptr, tiles_smem, sent, received = scheduler
    mbarrier.wait(sent.index(iteration % 2), (iteration // 2) & 1)
    tile = gl.max(tiles_smem.index(iteration % 2).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(received.index(iteration % 2))
    return tile


@gluon.jit
def init_scheduler(next_ptr):
    tiles_smem = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    sent = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    received = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(sent.index(slot), count=1)
        mbarrier.init(received.index(slot), count=2)
    return next_ptr, tiles_smem, sent, received


@gluon.jit
def choices_of(work, row, blocks, BLOCK: gl.constexpr, DEPTH: gl.constexpr):
    """Loads the choices of the rows of one of a tile's blocks; ones of a missing block are 2147483647."""
    layout: gl.constexpr = gl.BlockedLayout([1, DEPTH // 8], [4, 8], [4, 1], [1, 0])
    each = row + 64 * BLOCK + gl.arange(0, 64, gl.SliceLayout(1, layout))
    return gl.load(work[0] + each, mask=blocks > BLOCK, other=2147483647)


@gluon.jit
def token_of(choice, total, given):
    """The token of a choice, -1 where a row is padding."""
    return gl.where(choice < total, choice // given[2], -1)


@gluon.jit
def gather(given, token, start, to, DEPTH: gl.constexpr):
    """Loads a step of 64 rows by the loading group's threads, of the tokens that ``token_of`` gives; ``given`` is
    ``(pointer, stride, choices)``. Padding costs no traffic."""
    layout: gl.constexpr = gl.BlockedLayout([1, DEPTH // 8], [4, 8], [4, 1], [1, 0])
    a_ptr, a_stride, choices = given
    depth = start + gl.arange(0, DEPTH, gl.SliceLayout(0, layout))
    at = a_ptr + token.to(gl.int64)[:, None] * a_stride + depth[None, :]
    async_load(to, at, mask=(token >= 0)[:, None])


def programs_for(device: torch.device, tiles: int) -> int:
    """The number of persistent programs: one an SM, and no more than tiles."""
    return min(num_sms(device), tiles)
