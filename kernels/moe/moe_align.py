"""Sorts the rows of a grouped product by expert and pads each expert's to whole blocks.

All sizes follow from shapes, so that nothing waits for the device and a CUDA graph can hold it; and no atomics, so
that the order is the same every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last

_FEW = 1024
"""The most choices that one kernel sorts, each of whose programs counts all of them."""
_CHUNK = 128
"""Choices that are compared with each other, to number those of an expert."""
_PARTS = 128


@dataclass(frozen=True)
class Alignment:
    """Block b multiplies choices ``sorted_choices[b * block : (b + 1) * block]`` with the matrix of
    ``expert_of_block[b]`` (int32 both).

    A choice is an index into the flattened ``[T, K]`` ones, T * K where the block is padded. Blocks after the last have
    expert -1. ``positions`` [T * K] int32 is the inverse: the index of each choice in ``sorted_choices``, arbitrary
    where it has none.

    ``spans`` [n, 3] int32, on request, are ``(first block, blocks, expert)`` of tiles that have up to ``max_blocks``
    blocks of one expert, as equal as they can be; after the last ``(0, 0, -1)``. ``tile_counter`` [1] int32 is zero,
    for kernels whose programs take the next free tile.
    """

    sorted_choices: torch.Tensor
    expert_of_block: torch.Tensor
    positions: torch.Tensor
    block: int
    max_blocks: int = 0
    spans: torch.Tensor | None = None
    tile_counter: torch.Tensor | None = None


@triton.jit
def _fill_spans(spans_ptr, tile_counter_ptr, blocks, each, expert, num_experts, num_spans, first, last,
                MAX_BLOCKS: tl.constexpr):
    """Cuts the expert's blocks ``[first, last)`` into tiles; expert ``num_experts`` has the blocks after the last."""
    tiles = (blocks + MAX_BLOCKS - 1) // MAX_BLOCKS
    begin = tl.sum(tl.where(each < expert, tiles, 0), 0)
    count = (last - first + MAX_BLOCKS - 1) // MAX_BLOCKS
    value = expert
    if expert == num_experts:
        tl.store(tile_counter_ptr, 0)
        count, last, value = num_spans - begin, first, -1
    for start in range(0, count, 128):
        tile = start + tl.arange(0, 128)
        at, inside = spans_ptr + (begin + tile) * 3, tile < count
        beneath = tile * (last - first) // count
        tl.store(at, tl.where(last > first, first + beneath, 0), inside)
        tl.store(at + 1, (tile + 1) * (last - first) // count - beneath, inside)
        tl.store(at + 2, tl.zeros((128,), tl.int32) + value, inside)


@triton.jit
def _fill_expert(rows_ptr, expert_of_block_ptr, spans_ptr, tile_counter_ptr, counts, each, expert, num_experts,
                 num_blocks, num_spans, total, ROWS: tl.constexpr, MAX_BLOCKS: tl.constexpr):
    """Writes the expert's blocks, where experts have ``counts`` choices, and the padding of its last one; returns where
    they begin. Expert ``num_experts`` has the blocks after the last."""
    blocks = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(each < expert, blocks, 0), 0)
    last = first + tl.sum(tl.where(each == expert, blocks, 0), 0)
    if MAX_BLOCKS:
        _fill_spans(spans_ptr, tile_counter_ptr, blocks, each, expert, num_experts, num_spans, first, last, MAX_BLOCKS)
    value = expert
    if expert == num_experts:
        last, value = num_blocks, -1
    for start in range(first, last, 128):
        block = start + tl.arange(0, 128)
        tl.store(expert_of_block_ptr + block, tl.zeros((128,), tl.int32) + value, block < last)
    if expert < num_experts:
        pad = first * ROWS + tl.sum(tl.where(each == expert, counts, 0), 0) + tl.arange(0, ROWS)
        tl.store(rows_ptr + pad, tl.zeros((ROWS,), tl.int32) + total, pad < last * ROWS)
    return first


# Counts change with every step: specialized on 1 and on multiples of 16 the kernels would compile while requests wait.
@triton.jit(do_not_specialize=["total", "num_blocks", "num_spans"])
def _moe_sort_few_kernel(topk_ids_ptr, rows_ptr, expert_of_block_ptr, positions_ptr, spans_ptr, tile_counter_ptr, total,
                         num_blocks, num_spans, num_experts, ROWS: tl.constexpr, MAX_BLOCKS: tl.constexpr,
                         BLOCK_EXPERTS: tl.constexpr, FEW: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    expert = tl.program_id(0)  # num_places: the blocks after the last
    each = tl.arange(0, BLOCK_EXPERTS)
    index = tl.arange(0, FEW)
    chosen = tl.load(topk_ids_ptr + index, index < total, other=-1)
    chosen_here = (chosen >= 0) & (chosen < num_experts)
    counts = tl.histogram(tl.where(chosen_here, chosen, 0).to(tl.int32), BLOCK_EXPERTS, chosen_here)
    first = _fill_expert(rows_ptr, expert_of_block_ptr, spans_ptr, tile_counter_ptr, counts, each, expert, num_experts,
                         num_blocks, num_spans, total, ROWS, MAX_BLOCKS)
    hit = chosen_here & (chosen == expert)
    at = first * ROWS + tl.cumsum(hit.to(tl.int32), 0) - 1
    tl.store(rows_ptr + at, index, hit)
    tl.store(positions_ptr + index, at, hit)


@triton.jit(do_not_specialize=["total", "per_part"])
def _moe_count_kernel(topk_ids_ptr, counts_ptr, total, per_part, num_experts, BLOCK_EXPERTS: tl.constexpr,
                      CHUNK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    part = tl.program_id(0)
    begin = part * per_part
    end = tl.minimum(begin + per_part, total)
    counts = tl.zeros((BLOCK_EXPERTS,), tl.int32)
    for start in range(begin, end, CHUNK):
        index = start + tl.arange(0, CHUNK)
        chosen = tl.load(topk_ids_ptr + index, index < end, other=-1)
        chosen_here = (chosen >= 0) & (chosen < num_experts)
        counts += tl.histogram(tl.where(chosen_here, chosen, 0).to(tl.int32), BLOCK_EXPERTS, chosen_here)
    tl.store(counts_ptr + part * BLOCK_EXPERTS + tl.arange(0, BLOCK_EXPERTS), counts)


@triton.jit(do_not_specialize=["total", "per_part", "num_blocks", "num_spans"])
def _moe_sort_kernel(topk_ids_ptr, counts_ptr, rows_ptr, expert_of_block_ptr, positions_ptr, spans_ptr,
                     tile_counter_ptr, total, per_part, num_blocks, num_spans, num_experts, ROWS: tl.constexpr,
                     MAX_BLOCKS: tl.constexpr, PARTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
                     PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    part = tl.program_id(0)
    each, parts, index_in_chunk = tl.arange(0, BLOCK_EXPERTS), tl.arange(0, PARTS), tl.arange(0, CHUNK)
    counts = tl.load(counts_ptr + parts[:, None] * BLOCK_EXPERTS + each[None, :])
    of_expert = tl.sum(counts, 0)
    blocks = (of_expert + ROWS - 1) // ROWS
    firsts = tl.cumsum(blocks, 0) - blocks
    for expert in range(part, num_experts + 1, PARTS):
        _fill_expert(rows_ptr, expert_of_block_ptr, spans_ptr, tile_counter_ptr, of_expert, each, expert, num_experts,
                     num_blocks, num_spans, total, ROWS, MAX_BLOCKS)
    ahead = firsts * ROWS + tl.sum(tl.where((parts < part)[:, None], counts, 0), 0)
    end = tl.minimum(part * per_part + per_part, total)
    for start in range(part * per_part, end, CHUNK):
        index = start + index_in_chunk
        chosen = tl.load(topk_ids_ptr + index, index < end, other=-1).to(tl.int32)
        chosen_columns = tl.load(topk_ids_ptr + index, index < end,
                                 other=-1).to(tl.int32)  # in the other direction's layout
        chosen_here = (chosen >= 0) & (chosen < num_experts)
        before = (chosen[:, None] == chosen_columns[None, :]) & (index_in_chunk[None, :] < index_in_chunk[:, None])
        at = tl.gather(ahead, tl.where(chosen_here, chosen, 0), 0) + tl.sum(before.to(tl.int32), 1)
        tl.store(rows_ptr + at, index, chosen_here)
        tl.store(positions_ptr + index, at, chosen_here)
        ahead += tl.histogram(tl.where(chosen_here, chosen, 0), BLOCK_EXPERTS, chosen_here)


def num_blocks_of(choices: int, num_experts: int, block: int) -> int:
    """The most blocks that ``choices`` may fill: each expert that is chosen may leave one partly empty."""
    return min(choices, choices // block + min(num_experts, choices))


def moe_align(topk_ids: torch.Tensor, num_experts: int, block: int, max_blocks: int = 0) -> Alignment:
    """Sort the choices ``topk_ids`` [T, K] int64 by expert; those outside of ``[0, num_experts)`` are left out.

    ``block`` is a power of two. With ``max_blocks`` there are spans of at most that many blocks, on a GPU.
    """
    if not runs_triton(topk_ids):
        return Alignment(*reference.moe_align(topk_ids, num_experts, block), block)
    total = topk_ids.numel()
    num_blocks = num_blocks_of(total, num_experts, block)
    sorted_choices = torch.empty(num_blocks * block, dtype=torch.int32, device=topk_ids.device)
    expert_of_block = torch.empty(num_blocks, dtype=torch.int32, device=topk_ids.device)
    positions = torch.empty(total, dtype=torch.int32, device=topk_ids.device)
    num_spans, spans, tile_counter = 0, None, None
    if max_blocks:
        num_spans = num_blocks_of(total, num_experts, block * max_blocks)
        spans = torch.empty((num_spans, 3), dtype=torch.int32, device=topk_ids.device)
        tile_counter = torch.empty(1, dtype=torch.int32, device=topk_ids.device)
    if total:
        topk_ids, block_experts = topk_ids.contiguous(), max(32, triton.next_power_of_2(num_experts))
        if total <= _FEW:
            _moe_sort_few_kernel[(num_experts + 1,)](
                topk_ids, sorted_choices, expert_of_block, positions, spans, tile_counter, total, num_blocks, num_spans,
                num_experts, ROWS=block, MAX_BLOCKS=max_blocks, BLOCK_EXPERTS=block_experts, FEW=_FEW, **pdl(topk_ids))
        else:
            per_part = triton.cdiv(triton.cdiv(total, _PARTS), _CHUNK) * _CHUNK
            counts = torch.empty((_PARTS, block_experts), dtype=torch.int32, device=topk_ids.device)
            _moe_count_kernel[(_PARTS,)](topk_ids, counts, total, per_part, num_experts, BLOCK_EXPERTS=block_experts,
                                         CHUNK=_CHUNK, **pdl(topk_ids))
            _moe_sort_kernel[(_PARTS,)](
                topk_ids, counts, sorted_choices, expert_of_block, positions, spans, tile_counter, total, per_part,
                num_blocks, num_spans, num_experts, ROWS=block, MAX_BLOCKS=max_blocks, PARTS=_PARTS,
                BLOCK_EXPERTS=block_experts, CHUNK=_CHUNK, num_warps=8, **pdl(topk_ids))
    return Alignment(sorted_choices, expert_of_block, positions, block, max_blocks, spans, tile_counter)
