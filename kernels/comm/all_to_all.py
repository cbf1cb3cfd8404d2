"""All-to-all dispatch of tokens to the ranks of their experts, and combine of the results, through symmetric memory
over NVLink: for steps that are bound by the link's bandwidth, not by its latency.

A row is written once to each rank that has one of its token's experts; that rank adds up its experts' results and
writes one row back (as DeepEP does, github.com/deepseek-ai/DeepEP). Token t of rank s has slot ``s * most + t`` in
every rank's buffer, where ``most`` is the largest count of a rank in the step. So no rank needs to know where rows go,
or how many come: slots without a row have no choices. The host waits for nothing, and a CUDA graph can hold it.

A program increments a counter at every rank when its rows are written; the first program of each rank waits for the
counters of all others, so that later kernels find the rows. Dispatch and combine alternate: a rank that has received
all of a combine knows that all others have read what it sent before, and has itself read the last combine, since all
have sent the dispatch between them. So one buffer for each is enough.
"""

from __future__ import annotations

from typing import Any

import torch

from .._triton import tl, triton
from ..reference import FP8_LARGEST, FP8_LEAST
from ..tuning.all_to_all import CopyLaunch
from ..tuning.policy import policy_of
from .all_reduce import POLL_FOREVER
from .dispatch_buffers import GROUP, DispatchMemory


@triton.jit
def _pointer_at(base, begin, DTYPE: tl.constexpr):
    return tl.multiple_of((base + begin).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def _synchronize(bases_ptr, phase, max_polls, RANK: tl.constexpr, WORLD: tl.constexpr):
    """Increment this program's counter at the other ranks. The first program waits for all of theirs, ``max_polls``
    polls at most."""
    tl.debug_barrier()  # all threads have written
    for step in tl.static_range(1, WORLD):
        theirs = tl.load(bases_ptr + (RANK + step) % WORLD).to(tl.pointer_type(tl.int32))
        tl.atomic_add(theirs + phase * WORLD + RANK, 1, sem="release", scope="sys")
    if tl.program_id(0) == 0:
        own = tl.load(bases_ptr + RANK).to(tl.pointer_type(tl.int32)) + phase * WORLD
        for step in tl.static_range(1, WORLD):
            counter = own + (RANK + step) % WORLD
            seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
            polls = 0
            while (seen < tl.num_programs(0)) & (polls < max_polls):
                seen = tl.atomic_add(counter, 0, sem="acquire", scope="sys")
                polls += 1
            tl.store(counter, 0)  # others increment it again only after they have received this rank's next message


@triton.jit(do_not_specialize=["rows", "most", "max_polls"])
def _all_to_all_dispatch_kernel(x_ptr, topk_ids_ptr, weights_ptr, bases_ptr, rows, most, width, num_local_experts,
                                to_expert_ids, to_weights, to_scales, to_tokens, largest, least, max_polls,
                                RANK: tl.constexpr, WORLD: tl.constexpr, CHOICES: tl.constexpr,
                                BLOCK_CHOICES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                                GROUP_SIZE: tl.constexpr, SENT: tl.constexpr):
    choice = tl.arange(0, BLOCK_CHOICES)[None, :]
    for tile in range(tl.program_id(0), tl.cdiv(most, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        at = row[:, None] * CHOICES + choice
        known = (row < rows)[:, None] & (choice < CHOICES)
        topk_id = tl.load(topk_ids_ptr + at, known, other=-1)
        weight = tl.load(weights_ptr + at, known, other=0.0)
        slot = (RANK * most + row).to(tl.int64)
        spot = slot[:, None] * CHOICES + choice
        listed = (row < most)[:, None] & (choice < CHOICES)
        for step in tl.static_range(WORLD):
            base = tl.load(bases_ptr + (RANK + step) % WORLD)
            expert = topk_id - (RANK + step) % WORLD * num_local_experts
            here = (expert >= 0) & (expert < num_local_experts)
            tl.store(_pointer_at(base, to_expert_ids, tl.int64) + spot, tl.where(here, expert, -1), listed)
            tl.store(_pointer_at(base, to_weights, tl.float32) + spot, weight, listed)
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
                expert = topk_id - (RANK + step) % WORLD * num_local_experts
                there = tl.max(((expert >= 0) & (expert < num_local_experts)).to(tl.int32), 1) > 0
                tl.store(_pointer_at(base, to_tokens, SENT) + slot[:, None] * width + column[None, :], sent,
                         there[:, None] & inside)
                if GROUP_SIZE:
                    tl.store(_pointer_at(base, to_scales, tl.float32) + slot[:, None] * groups + group, scale,
                             there[:, None] & (group < groups))
    _synchronize(bases_ptr, 0, max_polls, RANK, WORLD)


@triton.jit(do_not_specialize=["most", "part", "max_polls"])
def _all_to_all_combine_kernel(made_ptr, expert_ids_ptr, weights_ptr, positions_ptr, bases_ptr, most, part, width,
                               num_local_experts, to_parts, max_polls, RANK: tl.constexpr, WORLD: tl.constexpr,
                               CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    across = tl.cdiv(width, BLOCK)
    for tile in range(tl.program_id(0), most * WORLD * across, tl.num_programs(0)):
        owner = (RANK + 1 + tile) % WORLD  # uses all links at once
        token = (tile // WORLD // across).to(tl.int64)
        column = tile // WORLD % across * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        total = tl.zeros((BLOCK,), tl.float32)
        some = token < 0
        for choice in tl.static_range(CHOICES):
            at = (owner * most + token) * CHOICES + choice
            expert = tl.load(expert_ids_ptr + at)
            weight = tl.load(weights_ptr + at)
            position = at
            if positions_ptr is not None:
                position = tl.load(positions_ptr + at).to(tl.int64)
            here = (expert >= 0) & (expert < num_local_experts)
            made = tl.load(made_ptr + position * width + column, inside & here, other=0.0)
            total += made.to(tl.float32) * weight
            some = some | here
        parts = _pointer_at(tl.load(bases_ptr + owner), to_parts, made_ptr.dtype.element_ty)
        tl.store(parts + (RANK * part + token) * width + column, total.to(made_ptr.dtype.element_ty), inside & some)
    _synchronize(bases_ptr, 1, max_polls, RANK, WORLD)


@triton.jit
def _combined_sum(parts_ptr, more_ptr, topk_ids_ptr, row, part, width, num_local_experts, column, inside,
                  WORLD: tl.constexpr, CHOICES: tl.constexpr, BLOCK_CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """Sums the row's results of all ranks that have its experts, in rank order, and of ``more``."""
    choice = tl.arange(0, BLOCK_CHOICES)
    topk_id = tl.load(topk_ids_ptr + row * CHOICES + choice, choice < CHOICES, other=-1)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        expert = topk_id - rank * num_local_experts
        there = tl.max(((expert >= 0) & (expert < num_local_experts)).to(tl.int32), 0) > 0
        total += tl.load(parts_ptr + (rank * part + row) * width + column, inside & there, other=0.0).to(tl.float32)
    if more_ptr is not None:
        total += tl.load(more_ptr + row * width + column, inside, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["part"])
def _reduce_combined_kernel(parts_ptr, more_ptr, topk_ids_ptr, residual_ptr, weight_ptr, total_ptr, y_ptr, part, width,
                            num_local_experts, eps, WORLD: tl.constexpr, CHOICES: tl.constexpr,
                            BLOCK_CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    total = _combined_sum(parts_ptr, more_ptr, topk_ids_ptr, row, part, width, num_local_experts, column, inside, WORLD,
                          CHOICES, BLOCK_CHOICES, BLOCK).to(total_ptr.dtype.element_ty)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + at, inside, other=0.0)
    tl.store(total_ptr + at, total, inside)
    if y_ptr is not None:
        wide = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        weight = tl.load(weight_ptr + column, inside, other=0.0)
        tl.store(y_ptr + at, (wide * scale).to(weight.dtype) * weight, inside)  # rounded first, as in rmsnorm


def all_to_all_dispatch(x: torch.Tensor, topk_ids: torch.Tensor, weights: torch.Tensor, most: int,
                        num_local_experts: int, peers: DispatchMemory, *, max_polls: int = POLL_FOREVER,
                        launch: CopyLaunch | None = None) -> None:
    """Send rows ``x`` [n, width] to the ranks of their experts, with ``weights`` [n, K] float32; then the ranks have
    ``peers.choices`` and ``peers.tokens``.

    ``topk_ids`` [n, K] int64 are physical experts, of which each rank has the next ``num_local_experts``. All are
    contiguous. ``most`` is n or more and equal on all ranks. All ranks alternate dispatch and combine, on one stream
    each.
    """
    layout = peers.layout
    assert x.is_contiguous() and topk_ids.is_contiguous() and weights.is_contiguous()
    assert len(x) <= most <= layout.rows and x.shape[1] == layout.width and topk_ids.shape[1] == layout.choices
    assert topk_ids.dtype == torch.int64 and weights.dtype == torch.float32 and x.dtype == peers.dtype
    policy = policy_of(x.device).all_to_all
    launch = launch or (policy.float8_dispatch if layout.float8 else policy.dispatch)
    block = min(2048, triton.next_power_of_2(layout.width))
    rows = max(1, launch.tile_values // block)
    _all_to_all_dispatch_kernel[(max(1, min(launch.programs, -(-most // rows))),)](
        x, topk_ids, weights, peers.bases, len(x), most, layout.width, num_local_experts, layout.expert_ids,
        layout.weights, layout.scales, layout.tokens, FP8_LARGEST, FP8_LEAST, max_polls, RANK=peers.rank,
        WORLD=layout.ranks, CHOICES=layout.choices, BLOCK_CHOICES=triton.next_power_of_2(layout.choices), ROWS=rows,
        BLOCK=block, GROUP_SIZE=GROUP if layout.float8 else 0,
        SENT=tl.float8e4nv if layout.float8 else _word(peers.dtype), num_warps=launch.num_warps)


def _word(dtype: torch.dtype) -> Any:
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def all_to_all_combine(made: torch.Tensor, positions: torch.Tensor | None, most: int, num_local_experts: int,
                       peers: DispatchMemory, *, max_polls: int = POLL_FOREVER,
                       launch: CopyLaunch | None = None) -> None:
    """Send this rank's part of every received token, the ``moe_sum`` of ``made`` and ``positions``, back to the token's
    rank; there ``reduce_combined`` adds the parts up."""
    layout = peers.layout
    ids, weights = peers.choices(most)
    assert made.is_contiguous() and made.dtype == peers.dtype and made.shape[1] == layout.width
    launch = launch or policy_of(made.device).all_to_all.combine
    block = min(launch.tile_values, triton.next_power_of_2(layout.width))
    _all_to_all_combine_kernel[(max(1, min(launch.programs, layout.ranks * most)),)](
        made, ids, weights, positions, peers.bases, most, layout.rows, layout.width, num_local_experts, layout.parts,
        max_polls, RANK=peers.rank, WORLD=layout.ranks, CHOICES=layout.choices, BLOCK=block, num_warps=launch.num_warps)


def reduce_combined(topk_ids: torch.Tensor, num_local_experts: int, peers: DispatchMemory,
                    more: torch.Tensor | None = None, residual: torch.Tensor | None = None,
                    weight: torch.Tensor | None = None, eps: float = 0.0) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(total, norm(total) * weight)`` of this rank's tokens [n, width]: the total is the sum of all ranks' parts in
    the last combine and of ``more``, rounded, plus ``residual`` [n, width]; both are optional. The norm is computed
    where there is a ``weight`` [width]. ``topk_ids`` [n, K] are those of the dispatch."""
    layout = peers.layout
    assert all(each is None or each.is_contiguous() for each in (topk_ids, more, residual))
    total = torch.empty((len(topk_ids), layout.width), dtype=peers.dtype, device=topk_ids.device)
    y = None if weight is None else torch.empty_like(total)
    block = triton.next_power_of_2(layout.width)
    if len(total):
        parts = peers.view(layout.parts, layout.slots, layout.width, dtype=peers.dtype)
        _reduce_combined_kernel[(len(total),)](
            parts, more, topk_ids, residual, weight, total, y, layout.rows, layout.width, num_local_experts, eps,
            WORLD=layout.ranks, CHOICES=layout.choices, BLOCK_CHOICES=triton.next_power_of_2(layout.choices),
            BLOCK=block, num_warps=max(1, min(16, block // 256)))
    return total, y
