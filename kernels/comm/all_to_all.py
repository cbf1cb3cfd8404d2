"""Tokens to the ranks of their experts and back, written straight into a few GPUs' memory over NVLink: the exchange of
steps that are bound by the link's rate, not by its latency.

A row is written once to each rank that holds one of its token's experts; that rank adds up what its experts make of it
and writes one row back (as DeepEP does, github.com/deepseek-ai/DeepEP). Token t of rank s has slot ``s * most + t`` in
every rank's buffer, where ``most`` is the largest count of a rank in the step. So nobody has to be told where rows go,
or how many come: slots that get none have no choices. The host waits for nothing, and a CUDA graph can hold it.

A program counts itself in at every rank when its rows are there; the first program of each rank waits for all others'.
So what is enqueued behind finds them. Dispatch and combine take turns: a rank that has everything from a combine
knows that all others have read what it sent before, and what came in the combine before is read by then, for all have
sent the dispatch between. So one place for each is enough.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._triton import tl, triton
from ..reference import FP8_LARGEST, FP8_LEAST
from .all_reduce import FOREVER
from .dispatch_buffers import GROUP, PeerAreas


class Launch(NamedTuple):
    """Programs at most, which take tiles of so many values in turn."""

    programs: int
    tile: int
    num_warps: int


DISPATCH = Launch(132, 16384, 16)
"""8,192 rows of 2,048 values take 102 us between two H200s, whose link takes 88 us for them; 64 programs take 105 us,
and of half the tile 116 us."""
FLOAT8_DISPATCH = Launch(528, 4096, 8)
"""60 us; 132 of 16 warps 64 us. It computes more for a byte."""
COMBINE = Launch(1056, 2048, 4)
"""110 us, of which reading four choices of each row takes 64; with half of the programs 151 us."""


@triton.jit
def _area(base, begin, DTYPE: tl.constexpr):
    return tl.multiple_of((base + begin).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _meet(bases_ptr, turn, patience, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Count this program in at the others. The first one waits for all of theirs, ``patience`` looks at most."""
    tl.debug_barrier()  # all threads have written
    for step in tl.static_range(1, WORLD):
        theirs = tl.load(bases_ptr + (RANK + step) % WORLD).to(tl.pointer_type(tl.int32))
        tl.atomic_add(theirs + turn * WORLD + RANK, 1, sem="release", scope="sys")
    if tl.program_id(0) == 0:
        own = tl.load(bases_ptr + RANK).to(tl.pointer_type(tl.int32)) + turn * WORLD
        for step in tl.static_range(1, WORLD):
            counter = own + (RANK + step) % WORLD
            seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
            looks = 0
            while (seen < tl.num_programs(0)) & (looks < patience):
                seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
                looks += 1
            tl.store(counter, 0)  # they come again only when they have heard of what is behind this


@triton.jit(do_not_specialize=["rows", "most", "patience"])
def _peer_dispatch_kernel(x_ptr, numbers_ptr, weights_ptr, bases_ptr, rows, most, width, places, to_places, to_weights,
                          to_scales, to_tokens, largest, least, patience, RANK: tl.constexpr, WORLD: tl.constexpr,
                          CHOICES: tl.constexpr, BLOCK_CHOICES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                          GROUP_SIZE: tl.constexpr, SENT: tl.constexpr):
    choice = tl.arange(0, BLOCK_CHOICES)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(most, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * CHOICES + choice
        known = (row < rows)[:, None] & (choice < CHOICES)
        number = tl.load(numbers_ptr + at, known, other=-1)
        weight = tl.load(weights_ptr + at, known, other=0.0)
        slot = (RANK * most + row).to(tl.int64)
        spot = slot[:, None] * CHOICES + choice
        listed = (row < most)[:, None] & (choice < CHOICES)
        for step in tl.static_range(WORLD):
            base = tl.load(bases_ptr + (RANK + step) % WORLD)
            place = number - (RANK + step) % WORLD * places
            here = (place >= 0) & (place < places)
            tl.store(_area(base, to_places, tl.int64) + spot, tl.where(here, place, -1), listed)
            tl.store(_area(base, to_weights, tl.float32) + spot, weight, listed)
        for first in range(0, width, BLOCK):
            column = first + tl.arange(0, BLOCK)
            inside = (column < width)[None, :]
            x = tl.load(x_ptr + row.to(tl.int64)[:, None] * width + column[None, :], (row < rows)[:, None] & inside,
                        other=0.0)
            if GROUP_SIZE:
                GROUPS: tl.constexpr = BLOCK // GROUP_SIZE
                wide = tl.reshape(x.to(tl.float32), (ROWS, GROUPS, GROUP_SIZE))
                scale = tl.maximum(tl.max(tl.abs(wide), 2), least) / largest
                wide = tl.minimum(tl.maximum(wide / scale[:, :, None], -largest), largest)
                sent = tl.reshape(wide, (ROWS, BLOCK)).to(SENT)
                groups = tl.cdiv(width, GROUP_SIZE)
                group = first // GROUP_SIZE + tl.arange(0, GROUPS)[None, :]
            else:
                sent = x
            for step in tl.static_range(WORLD):
                base = tl.load(bases_ptr + (RANK + step) % WORLD)
                place = number - (RANK + step) % WORLD * places
                there = tl.max(((place >= 0) & (place < places)).to(tl.int32), 1) > 0
                tl.store(_area(base, to_tokens, SENT) + slot[:, None] * width + column[None, :], sent,
                         there[:, None] & inside)
                if GROUP_SIZE:
                    tl.store(_area(base, to_scales, tl.float32) + slot[:, None] * groups + group, scale,
                             there[:, None] & (group < groups))
    _meet(bases_ptr, 0, patience, RANK, WORLD)


@triton.jit(do_not_specialize=["most", "part", "patience"])
def _peer_combine_kernel(made_ptr, places_ptr, weights_ptr, positions_ptr, bases_ptr, most, part, width, places,
                         to_parts, patience, RANK: tl.constexpr, WORLD: tl.constexpr, CHOICES: tl.constexpr,
                         BLOCK: tl.constexpr):
    across = tl.cdiv(width, BLOCK)
    for tile in range(tl.program_id(0), most * WORLD * across, tl.num_programs(0)):
        owner = (RANK + 1 + tile) % WORLD  # all links at once
        token = (tile // WORLD // across).to(tl.int64)
        column = tile // WORLD % across * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        total = tl.zeros((BLOCK,), tl.float32)
        some = token < 0
        for choice in tl.static_range(CHOICES):
            at = (owner * most + token) * CHOICES + choice
            place = tl.load(places_ptr + at)
            weight = tl.load(weights_ptr + at)
            position = at
            if positions_ptr is not None:
                position = tl.load(positions_ptr + at).to(tl.int64)
            here = (place >= 0) & (place < places)
            made = tl.load(made_ptr + position * width + column, inside & here, other=0.0)
            total += made.to(tl.float32) * weight
            some = some | here
        parts = _area(tl.load(bases_ptr + owner), to_parts, made_ptr.dtype.element_ty)
        tl.store(parts + (RANK * part + token) * width + column, total.to(made_ptr.dtype.element_ty), inside & some)
    _meet(bases_ptr, 1, patience, RANK, WORLD)


@triton.jit
def _peer_total(parts_ptr, more_ptr, numbers_ptr, row, part, width, places, column, inside, WORLD: tl.constexpr,
                CHOICES: tl.constexpr, BLOCK_CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of what the ranks of the row's experts have made of it, in their order, and ``more`` of it."""
    choice = tl.arange(0, BLOCK_CHOICES)
    number = tl.load(numbers_ptr + row * CHOICES + choice, choice < CHOICES, other=-1)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        place = number - rank * places
        there = tl.max(((place >= 0) & (place < places)).to(tl.int32), 0) > 0
        total += tl.load(parts_ptr + (rank * part + row) * width + column, inside & there, other=0.0).to(tl.float32)
    if more_ptr is not None:
        total += tl.load(more_ptr + row * width + column, inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["part"])
def _peer_parts_kernel(parts_ptr, more_ptr, numbers_ptr, residual_ptr, weight_ptr, total_ptr, y_ptr, part, width,
                       places, eps, WORLD: tl.constexpr, CHOICES: tl.constexpr, BLOCK_CHOICES: tl.constexpr,
                       BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    total = _peer_total(parts_ptr, more_ptr, numbers_ptr, row, part, width, places, column, inside, WORLD, CHOICES,
                        BLOCK_CHOICES, BLOCK).to(total_ptr.dtype.element_ty)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, inside, other=0.0)
    tl.store(total_ptr + at, total, inside)
    if y_ptr is not None:
        wide = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        weight = tl.load(weight_ptr + column, inside, other=0.0)
        tl.store(y_ptr + at, (wide * scale).to(total.dtype) * weight, inside)  # rounded first, as in rmsnorm


def peer_dispatch(x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor, most: int, places: int,
                  peers: PeerAreas, *, patience: int = FOREVER, launch: Launch | None = None) -> None:
    """Bring rows ``x`` [n, width] to the ranks of their experts, with ``weights`` [n, K] float32; the ranks have
    ``peers.choices`` and ``peers.tokens`` when it is done.

    ``numbers`` [n, K] int64: rank r holds ``[r * places, (r + 1) * places)``. All are contiguous. ``most`` is n at most
    and equal on all ranks. All ranks dispatch and combine in turns, on one stream each.
    """
    areas = peers.areas
    assert x.is_contiguous() and numbers.is_contiguous() and weights.is_contiguous()
    assert len(x) <= most <= areas.rows and x.shape[1] == areas.width and numbers.shape[1] == areas.choices
    assert numbers.dtype == torch.int64 and weights.dtype == torch.float32 and x.dtype == peers.dtype
    launch = launch or (FLOAT8_DISPATCH if areas.float8 else DISPATCH)
    block = min(2048, triton.next_power_of_2(areas.width))
    rows = max(1, launch.tile // block)
    _peer_dispatch_kernel[(max(1, min(launch.programs, -(-most // rows))),)](
        x, numbers, weights, peers.bases, len(x), most, areas.width, places, areas.places, areas.weights, areas.scales,
        areas.tokens, FP8_LARGEST, FP8_LEAST, patience, RANK=peers.rank, WORLD=areas.ranks, CHOICES=areas.choices,
        BLOCK_CHOICES=triton.next_power_of_2(areas.choices), ROWS=rows, BLOCK=block,
        GROUP_SIZE=GROUP if areas.float8 else 0, SENT=tl.float8e4nv if areas.float8 else _word(peers.dtype),
        num_warps=launch.num_warps)


def _word(dtype: torch.dtype) -> Any:
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def peer_combine(made: torch.Tensor, positions: torch.Tensor | None, most: int, places: int, peers: PeerAreas, *,
                 patience: int = FOREVER, launch: Launch = COMBINE) -> None:
    """Bring this rank's part of every token that has come, ``moe_sum``'s of ``made`` and ``positions``, to where the
    token is from; ``peer_parts`` then has them all."""
    areas = peers.areas
    ids, weights = peers.choices(most)
    assert made.is_contiguous() and made.dtype == peers.dtype and made.shape[1] == areas.width
    block = min(launch.tile, triton.next_power_of_2(areas.width))
    _peer_combine_kernel[(max(1, min(launch.programs, areas.ranks * most)),)](
        made, ids, weights, positions, peers.bases, most, areas.rows, areas.width, places, areas.parts, patience,
        RANK=peers.rank, WORLD=areas.ranks, CHOICES=areas.choices, BLOCK=block,
        num_warps=launch.num_warps)


def peer_parts(numbers: torch.Tensor, places: int, peers: PeerAreas, more: torch.Tensor | None = None,
               residual: torch.Tensor | None = None, weight: torch.Tensor | None = None,
               eps: float = 0.0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(total, norm(total) * weight)`` of the sums ``[n, width]`` of what all ranks have made of this one's tokens in
    the last combine, of ``more`` and, rounded behind that, of ``residual`` [n, width], where there are any; the norm
    with a ``weight`` [width]. ``numbers`` [n, K] are those of the dispatch."""
    areas = peers.areas
    assert all(each is None or each.is_contiguous() for each in (numbers, more, residual))
    total = torch.empty((len(numbers), areas.width), dtype=peers.dtype, device=numbers.device)
    y = None if weight is None else torch.empty_like(total)
    block = triton.next_power_of_2(areas.width)
    if len(total):
        parts = peers.view(areas.parts, areas.slots, areas.width, dtype=peers.dtype)
        _peer_parts_kernel[(len(total),)](
            parts, more, numbers, residual, weight, total, y, areas.rows, areas.width, places, eps, WORLD=areas.ranks,
            CHOICES=areas.choices, BLOCK_CHOICES=triton.next_power_of_2(areas.choices), BLOCK=block,
            num_warps=max(1, min(16, block // 256)))
    return total, y
