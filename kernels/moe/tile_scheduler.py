"""How programs of warps with roles share the tiles of a grouped product: each takes the next one that nobody has.

``work``: ``(rows, spans, choices in all, number of spans, column blocks, band)``, of a ``moe_align.Alignment`` with
blocks of 64 rows. ``turning``: the counter in global memory, and what the loading group tells the others of it.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .._gluon import async_load
from ..attention.decode_plan import processors_of

STEP_BYTES = gl.constexpr(128)
"""Depth of a step: as wide as the tensor memory accelerator's swizzle."""
REGISTERS_AT_START = 168
"""Of each of 384 threads; then the groups that multiply have more, and the one that loads fewer."""


@gluon.jit
def tile_at(tile, work, COLUMNS: gl.constexpr):
    """``(first row, first column, place, blocks of 64 rows)``; behind the last tile the place is -1.

    A band of spans, before the next columns, keeps an expert's matrix cached."""
    spans_ptr, num_spans, column_blocks, band = work[1], work[3], work[4], work[5]
    inside = tile < num_spans * column_blocks
    first = tile // (band * column_blocks) * band
    height = gl.maximum(gl.minimum(num_spans - first, band), 1)
    within = tile - first * column_blocks
    span = spans_ptr + (first + within % height) * 3
    block = gl.load(span, mask=inside, other=0)
    blocks = gl.load(span + 1, mask=inside, other=0)
    place = gl.load(span + 2, mask=inside, other=-1)
    return block * 64, within // height * COLUMNS, place, blocks


@gluon.jit
def give_turn(turning, turn, work):
    """The next tile that nobody has, which the multiplying groups are told too. Whoever takes the last turn leaves the
    counter at zero, for the next product."""
    next_ptr, turns, said, heard = turning
    taken = gl.atomic_add(next_ptr, 1, sem="relaxed")
    if taken == work[3] * work[4] - 1:
        gl.store(next_ptr, 0)
    tile = taken + gl.num_programs(0)
    mbarrier.wait(heard.index(turn % 2), ((turn // 2) & 1) ^ 1)
    turns.index(turn % 2).store(gl.full([32], tile, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    mbarrier.arrive(said.index(turn % 2))
    return tile


@gluon.jit
def take_turn(turning, turn):
    next_ptr, turns, said, heard = turning
    mbarrier.wait(said.index(turn % 2), (turn // 2) & 1)
    tile = gl.max(turns.index(turn % 2).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(heard.index(turn % 2))
    return tile


@gluon.jit
def turning_of(next_ptr):
    turns = gl.allocate_shared_memory(gl.int32, [2, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    said = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(said.index(slot), count=1)
        mbarrier.init(heard.index(slot), count=2)
    return next_ptr, turns, said, heard


@gluon.jit
def choices_of(work, row, blocks, BLOCK: gl.constexpr, DEPTH: gl.constexpr):
    """Of the rows of one of a tile's blocks, which may have fewer."""
    layout: gl.constexpr = gl.BlockedLayout([1, DEPTH // 8], [4, 8], [4, 1], [1, 0])
    each = row + 64 * BLOCK + gl.arange(0, 64, gl.SliceLayout(1, layout))
    return gl.load(work[0] + each, mask=blocks > BLOCK, other=2147483647)


@gluon.jit
def token_of(choice, total, given):
    """-1 where a row is padding."""
    return gl.where(choice < total, choice // given[2], -1)


@gluon.jit
def gather(given, token, start, to, DEPTH: gl.constexpr):
    """A step of 64 rows' ``token_of`` by the loading group's threads, ``given`` ``(pointer, stride, choices)``.
    Padding costs no traffic."""
    layout: gl.constexpr = gl.BlockedLayout([1, DEPTH // 8], [4, 8], [4, 1], [1, 0])
    a_ptr, a_stride, choices = given
    depth = start + gl.arange(0, DEPTH, gl.SliceLayout(0, layout))
    at = a_ptr + token.to(gl.int64)[:, None] * a_stride + depth[None, :]
    async_load(to, at, mask=(token >= 0)[:, None])


def programs_for(device: torch.device, tiles: int) -> int:
    """They stay on their multiprocessors."""
    return min(processors_of(device), tiles)
