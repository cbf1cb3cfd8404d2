"""Rows of a grouped product, sorted by the matrix that each is multiplied with and padded to whole blocks.

All sizes follow from shapes, so that nothing waits for the device and a CUDA graph can hold it; and no atomics, so
that the order is the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from . import reference
from ._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last

_BLOCK = 1024
_MOST_PARTS = 16


@dataclass(frozen=True)
class Alignment:
    """Block b multiplies rows ``rows[b * block : (b + 1) * block]`` with matrix ``place[b]`` (int32 both).

    A row is an index into the flattened ``[T, K]`` choices, T * K where the block is padded. Blocks behind the last
    have place -1. ``positions`` [T * K] int32 is the way back: where ``rows`` has each choice, arbitrary where it has
    not.
    """

    rows: torch.Tensor
    place: torch.Tensor
    positions: torch.Tensor
    block: int


# Counts change with every step: specialized on 1 and on multiples of 16 the kernels would compile while requests wait.
@triton.jit(do_not_specialize=["total", "per_part"])
def _moe_count_kernel(places_ptr, counts_ptr, total, per_part, PARTS: tl.constexpr, BLOCK: tl.constexpr,
                      PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    place = tl.program_id(0)
    part = tl.program_id(1)
    begin = part * per_part
    end = tl.minimum(begin + per_part, total)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        found += (tl.load(places_ptr + index, index < end, other=-1) == place).to(tl.int32)
    tl.store(counts_ptr + place * PARTS + part, tl.sum(found, 0))


@triton.jit(do_not_specialize=["total", "per_part", "num_blocks"])
def _moe_sort_kernel(places_ptr, counts_ptr, rows_ptr, place_ptr, positions_ptr, total, per_part, num_blocks,
                     num_places, ROWS: tl.constexpr, PARTS: tl.constexpr, COUNTED: tl.constexpr,
                     BLOCK_PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    place = tl.program_id(0)  # num_places: what is behind the last
    part = tl.program_id(1)
    each = tl.arange(0, BLOCK_PLACES)
    parts = tl.arange(0, PARTS)
    if COUNTED:
        counts = tl.load(counts_ptr + each[:, None] * PARTS + parts[None, :], (each < num_places)[:, None], other=0)
    else:  # so few choices that every program counts all
        index = tl.arange(0, BLOCK)
        chosen = tl.load(places_ptr + index, index < total, other=-1)
        held = (chosen >= 0) & (chosen < num_places)
        counts = tl.histogram(tl.where(held, chosen, 0).to(tl.int32), BLOCK_PLACES, held)[:, None]
    blocks = (tl.sum(counts, 1) + ROWS - 1) // ROWS
    first = tl.sum(tl.where(each < place, blocks, 0), 0)
    last = first + tl.sum(tl.where(each == place, blocks, 0), 0)
    mine = tl.where((each == place)[:, None], counts, 0)
    if part == 0:
        value = place
        if place == num_places:
            value = -1
            last = num_blocks
        for start in range(first, last, BLOCK):
            block = start + tl.arange(0, BLOCK)
            tl.store(place_ptr + block, tl.zeros((BLOCK,), tl.int32) + value, block < last)
        if place < num_places:
            pad = first * ROWS + tl.sum(tl.sum(mine, 1), 0) + tl.arange(0, ROWS)
            tl.store(rows_ptr + pad, tl.zeros((ROWS,), tl.int32) + total, pad < last * ROWS)
    position = first * ROWS + tl.sum(tl.sum(tl.where((parts < part)[None, :], mine, 0), 1), 0)
    begin = part * per_part
    end = tl.minimum(begin + per_part, total)
    if place < num_places:
        for start in range(begin, end, BLOCK):
            index = start + tl.arange(0, BLOCK)
            hit = (tl.load(places_ptr + index, index < end, other=-1) == place).to(tl.int32)
            at = position + tl.cumsum(hit, 0) - 1
            tl.store(rows_ptr + at, index, hit != 0)
            tl.store(positions_ptr + index, at, hit != 0)
            position += tl.sum(hit, 0)


def num_blocks_of(choices: int, num_places: int, block: int) -> int:
    """Blocks at most: each place that is chosen may leave one unfilled."""
    return min(choices, choices // block + min(num_places, choices))


def moe_align(places: torch.Tensor, num_places: int, block: int) -> Alignment:
    """Sort the choices ``places`` [T, K] int64 by place; those outside of ``[0, num_places)`` are left out.

    ``block`` is a power of two.
    """
    if not runs_triton(places):
        return Alignment(*reference.moe_align(places, num_places, block), block)
    total = places.numel()
    num_blocks = num_blocks_of(total, num_places, block)
    rows = torch.empty(num_blocks * block, dtype=torch.int32, device=places.device)
    place = torch.empty(num_blocks, dtype=torch.int32, device=places.device)
    positions = torch.empty(total, dtype=torch.int32, device=places.device)
    if total:
        parts = 1 if total <= 2 * _BLOCK else _MOST_PARTS
        per_part = triton.cdiv(triton.cdiv(total, parts), _BLOCK) * _BLOCK
        counts = torch.empty((num_places, parts), dtype=torch.int32, device=places.device)
        places = places.contiguous()
        if total > _BLOCK:
            _moe_count_kernel[(num_places, parts)](places, counts, total, per_part, PARTS=parts, BLOCK=_BLOCK,
                                                   **pdl(places))
        _moe_sort_kernel[(num_places + 1, parts)](
            places, counts, rows, place, positions, total, per_part, num_blocks, num_places, ROWS=block, PARTS=parts,
            COUNTED=total > _BLOCK, BLOCK_PLACES=max(32, triton.next_power_of_2(num_places)), BLOCK=_BLOCK,
            **pdl(places))
    return Alignment(rows, place, positions, block)
