"""Rows of a grouped product, sorted by the matrix that each is multiplied with and padded to whole blocks.

All sizes follow from shapes, so that nothing waits for the device and a CUDA graph can hold it; and no atomics, so
that the order is the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last

_FEW = 1024
"""Choices that every program of one kernel counts for itself."""
_CHUNK = 128
"""Choices that are compared with each other, to number those of a place."""
_PARTS = 128


@dataclass(frozen=True)
class Alignment:
    """Block b multiplies rows ``rows[b * block : (b + 1) * block]`` with matrix ``place[b]`` (int32 both).

    A row is an index into the flattened ``[T, K]`` choices, T * K where the block is padded. Blocks behind the last
    have place -1. ``positions`` [T * K] int32 is the way back: where ``rows`` has each choice, arbitrary where it has
    not.

    ``spans`` [n, 3] int32, where they are asked for, are ``(first block, blocks, place)`` of tiles that have up to
    ``tall`` blocks of one place, as equal as they can be; behind the last ``(0, 0, -1)``. ``turn`` [1] int32 is zero,
    for kernels whose programs take such tiles in turn.
    """

    rows: torch.Tensor
    place: torch.Tensor
    positions: torch.Tensor
    block: int
    tall: int = 0
    spans: torch.Tensor | None = None
    turn: torch.Tensor | None = None


@triton.jit
def _fill_spans(spans_ptr, turn_ptr, blocks, each, place, num_places, num_spans, first, last, TALL: tl.constexpr):
    """The place's ``[first, last)`` of all blocks, cut into tiles; ``num_places``: those behind the last."""
    tiles = (blocks + TALL - 1) // TALL
    begin = tl.sum(tl.where(each < place, tiles, 0), 0)
    count = (last - first + TALL - 1) // TALL
    value = place
    if place == num_places:
        tl.store(turn_ptr, 0)
        count, last, value = num_spans - begin, first, -1
    for start in range(0, count, 128):
        tile = start + tl.arange(0, 128)
        at, inside = spans_ptr + (begin + tile) * 3, tile < count
        beneath = tile * (last - first) // count
        tl.store(at, tl.where(last > first, first + beneath, 0), inside)
        tl.store(at + 1, (tile + 1) * (last - first) // count - beneath, inside)
        tl.store(at + 2, tl.zeros((128,), tl.int32) + value, inside)


@triton.jit
def _fill_place(rows_ptr, place_ptr, spans_ptr, turn_ptr, counts, each, place, num_places, num_blocks, num_spans, total,
                ROWS: tl.constexpr, TALL: tl.constexpr):
    """Writes which blocks are the place's, of ``counts`` choices each, and the padding of its last one. Where they
    begin. ``num_places``: what is behind the last."""
    blocks = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(each < place, blocks, 0), 0)
    last = first + tl.sum(tl.where(each == place, blocks, 0), 0)
    if TALL:
        _fill_spans(spans_ptr, turn_ptr, blocks, each, place, num_places, num_spans, first, last, TALL)
    value = place
    if place == num_places:
        last, value = num_blocks, -1
    for start in range(first, last, 128):
        block = start + tl.arange(0, 128)
        tl.store(place_ptr + block, tl.zeros((128,), tl.int32) + value, block < last)
    if place < num_places:
        pad = first * ROWS + tl.sum(tl.where(each == place, counts, 0), 0) + tl.arange(0, ROWS)
        tl.store(rows_ptr + pad, tl.zeros((ROWS,), tl.int32) + total, pad < last * ROWS)
    return first


# Counts change with every step: specialized on 1 and on multiples of 16 the kernels would compile while requests wait.
@triton.jit(do_not_specialize=["total", "num_blocks", "num_spans"])
def _moe_sort_few_kernel(places_ptr, rows_ptr, place_ptr, positions_ptr, spans_ptr, turn_ptr, total, num_blocks,
                         num_spans, num_places, ROWS: tl.constexpr, TALL: tl.constexpr, BLOCK_PLACES: tl.constexpr,
                         FEW: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    place = tl.program_id(0)  # num_places: what is behind the last
    each = tl.arange(0, BLOCK_PLACES)
    index = tl.arange(0, FEW)
    chosen = tl.load(places_ptr + index, index < total, other=-1)
    held = (chosen >= 0) & (chosen < num_places)
    counts = tl.histogram(tl.where(held, chosen, 0).to(tl.int32), BLOCK_PLACES, held)
    first = _fill_place(rows_ptr, place_ptr, spans_ptr, turn_ptr, counts, each, place, num_places, num_blocks,
                        num_spans, total, ROWS, TALL)
    hit = held & (chosen == place)
    at = first * ROWS + tl.cumsum(hit.to(tl.int32), 0) - 1
    tl.store(rows_ptr + at, index, hit)
    tl.store(positions_ptr + index, at, hit)


@triton.jit(do_not_specialize=["total", "per_part"])
def _moe_count_kernel(places_ptr, counts_ptr, total, per_part, num_places, BLOCK_PLACES: tl.constexpr,
                      CHUNK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    part = tl.program_id(0)
    begin = part * per_part
    end = tl.minimum(begin + per_part, total)
    counts = tl.zeros((BLOCK_PLACES,), tl.int32)
    for start in range(begin, end, CHUNK):
        index = start + tl.arange(0, CHUNK)
        chosen = tl.load(places_ptr + index, index < end, other=-1)
        held = (chosen >= 0) & (chosen < num_places)
        counts += tl.histogram(tl.where(held, chosen, 0).to(tl.int32), BLOCK_PLACES, held)
    tl.store(counts_ptr + part * BLOCK_PLACES + tl.arange(0, BLOCK_PLACES), counts)


@triton.jit(do_not_specialize=["total", "per_part", "num_blocks", "num_spans"])
def _moe_sort_kernel(places_ptr, counts_ptr, rows_ptr, place_ptr, positions_ptr, spans_ptr, turn_ptr, total, per_part,
                     num_blocks, num_spans, num_places, ROWS: tl.constexpr, TALL: tl.constexpr, PARTS: tl.constexpr,
                     BLOCK_PLACES: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    part = tl.program_id(0)
    each, parts, lane = tl.arange(0, BLOCK_PLACES), tl.arange(0, PARTS), tl.arange(0, CHUNK)
    counts = tl.load(counts_ptr + parts[:, None] * BLOCK_PLACES + each[None, :])
    of_place = tl.sum(counts, 0)
    blocks = (of_place + ROWS - 1) // ROWS
    firsts = tl.cumsum(blocks, 0) - blocks
    for place in range(part, num_places + 1, PARTS):
        _fill_place(rows_ptr, place_ptr, spans_ptr, turn_ptr, of_place, each, place, num_places, num_blocks, num_spans,
                    total, ROWS, TALL)
    ahead = firsts * ROWS + tl.sum(tl.where((parts < part)[:, None], counts, 0), 0)
    end = tl.minimum(part * per_part + per_part, total)
    for start in range(part * per_part, end, CHUNK):
        index = start + lane
        chosen = tl.load(places_ptr + index, index < end, other=-1).to(tl.int32)
        again = tl.load(places_ptr + index, index < end, other=-1).to(tl.int32)  # in the other direction's layout
        held = (chosen >= 0) & (chosen < num_places)
        before = (chosen[:, None] == again[None, :]) & (lane[None, :] < lane[:, None])
        at = tl.gather(ahead, tl.where(held, chosen, 0), 0) + tl.sum(before.to(tl.int32), 1)
        tl.store(rows_ptr + at, index, held)
        tl.store(positions_ptr + index, at, held)
        ahead += tl.histogram(tl.where(held, chosen, 0), BLOCK_PLACES, held)


def num_blocks_of(choices: int, num_places: int, block: int) -> int:
    """Blocks at most: each place that is chosen may leave one unfilled."""
    return min(choices, choices // block + min(num_places, choices))


def moe_align(places: torch.Tensor, num_places: int, block: int, tall: int = 0) -> Alignment:
    """Sort the choices ``places`` [T, K] int64 by place; those outside of ``[0, num_places)`` are left out.

    ``block`` is a power of two. With ``tall`` there are spans of so many blocks at most, on a GPU.
    """
    if not runs_triton(places):
        return Alignment(*reference.moe_align(places, num_places, block), block)
    total = places.numel()
    num_blocks = num_blocks_of(total, num_places, block)
    rows = torch.empty(num_blocks * block, dtype=torch.int32, device=places.device)
    place = torch.empty(num_blocks, dtype=torch.int32, device=places.device)
    positions = torch.empty(total, dtype=torch.int32, device=places.device)
    num_spans, spans, turn = 0, None, None
    if tall:
        num_spans = num_blocks_of(total, num_places, block * tall)
        spans = torch.empty((num_spans, 3), dtype=torch.int32, device=places.device)
        turn = torch.empty(1, dtype=torch.int32, device=places.device)
    if total:
        places, block_places = places.contiguous(), max(32, triton.next_power_of_2(num_places))
        if total <= _FEW:
            _moe_sort_few_kernel[(num_places + 1,)](
                places, rows, place, positions, spans, turn, total, num_blocks, num_spans, num_places, ROWS=block,
                TALL=tall, BLOCK_PLACES=block_places, FEW=_FEW, **pdl(places))
        else:
            per_part = triton.cdiv(triton.cdiv(total, _PARTS), _CHUNK) * _CHUNK
            counts = torch.empty((_PARTS, block_places), dtype=torch.int32, device=places.device)
            _moe_count_kernel[(_PARTS,)](places, counts, total, per_part, num_places, BLOCK_PLACES=block_places,
                                         CHUNK=_CHUNK, **pdl(places))
            _moe_sort_kernel[(_PARTS,)](
                places, counts, rows, place, positions, spans, turn, total, per_part, num_blocks, num_spans, num_places,
                ROWS=block, TALL=tall, PARTS=_PARTS, BLOCK_PLACES=block_places, CHUNK=_CHUNK, num_warps=8,
                **pdl(places))
    return Alignment(rows, place, positions, block, tall, spans, turn)
