"""Moves keys and values of accepted drafts to the slots where a chain would have them.

The drafts of a tree are stored in the order of their rows. After a step the accepted ones are moved to the slots right
after their request's newest token, in all layers. A draft's slot is at or before its place in the path, so that a
program may move one after the other: each slot is read before it is overwritten.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import runs_triton, tl, triton

_LANES = 16
"""Heads' keys or values of a layer that a program moves at once."""


@triton.jit(do_not_specialize=["num_rows", "depth"])
def _move_slots_kernel(memory_ptr, page_ptr, offset_ptr, first_row_ptr, path_ptr, num_rows, depth, lanes, stride_page,
                       stride_lane, stride_slot, WORDS: tl.constexpr, BLOCK_WORDS: tl.constexpr, LANES: tl.constexpr):
    request = tl.program_id(0)
    lane = tl.program_id(1) * LANES + tl.arange(0, LANES)
    word = tl.arange(0, BLOCK_WORDS)
    inside = (lane < lanes)[:, None] & (word < WORDS)[None, :]
    values = memory_ptr + lane.to(tl.int64)[:, None] * stride_lane + word[None, :]
    first_row = tl.load(first_row_ptr + request)
    for step in range(1, depth):
        source = tl.load(path_ptr + request * depth + step)
        target = first_row + step
        if (source < num_rows) & (source != target):
            source_at = tl.load(page_ptr + source) * stride_page + tl.load(offset_ptr + source) * stride_slot
            target_at = tl.load(page_ptr + target) * stride_page + tl.load(offset_ptr + target) * stride_slot
            tl.store(values + target_at, tl.load(values + source_at, inside), inside)


def move_slots(memory: torch.Tensor, page_of_row: torch.Tensor, offset_in_page: torch.Tensor, first_rows: torch.Tensor,
               paths: torch.Tensor) -> None:
    """Copies the slots of rows on ``paths`` to those of the rows from ``first_rows`` on, in order.

    ``memory`` [pages, layers, planes, heads, page_size, D] is a layer group of a pool, contiguous. Row t of a step was
    stored at ``offset_in_page[t]`` of ``page_of_row[t]`` ([T] int64). The slot of row ``paths[b, i]`` goes to that of
    row ``first_rows[b] + i``; ``paths`` [B, depth] int64 ascend in each request, and have T or more after their ends.
    """
    if not runs_triton(memory):
        reference.move_slots(memory, page_of_row, offset_in_page, first_rows, paths)
        return
    pages, layers, planes, heads, page_size, dim = memory.shape
    bytes_per_slot = dim * memory.itemsize
    word = torch.int32 if bytes_per_slot % 4 == 0 else torch.uint8
    words, lanes = bytes_per_slot // word.itemsize, layers * planes * heads
    flat = memory.view(pages, lanes, page_size, dim).view(word)
    requests, depth = paths.shape
    _move_slots_kernel[(requests, triton.cdiv(lanes, _LANES))](
        flat, page_of_row, offset_in_page, first_rows, paths, len(page_of_row), depth, lanes, flat.stride(0),
        flat.stride(1), flat.stride(2), WORDS=words, BLOCK_WORDS=triton.next_power_of_2(words), LANES=_LANES)
