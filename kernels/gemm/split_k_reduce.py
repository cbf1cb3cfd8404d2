"""Adds up a split-K product: the program of a tile that ends last sums the partial results of all splits."""

from __future__ import annotations

from functools import cache

import torch

from .._triton import tl, triton


@triton.jit
def last_split_sum(acc, partial_ptr, counter_ptr, program, split, splits, size, offset, inside):
    """``(is this program the tile's last, the tile's sum if it is)``.

    ``acc`` is this split's tile, of ``size`` values in all tiles together, and ``offset`` where among them its values
    are. Splits are added in their order, whichever ends last: no race decides a sum.
    """
    tl.store(partial_ptr + split.to(tl.int64) * size + offset, acc, inside)
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr + program, 1, sem="acq_rel") == splits - 1
    if last:
        tl.store(counter_ptr + program, 0)
        acc = tl.zeros(acc.shape, tl.float32)
        for other in range(splits):
            acc += tl.load(partial_ptr + tl.cast(other, tl.int64) * size + offset, inside, other=0.0,
                           cache_modifier=".cg")
    return last, acc


def split_counters(device: torch.device) -> torch.Tensor:
    """Returns counters of each tile's finished splits: zeros between launches, which the last split restores. Products
    on one stream follow each other, and share them; a captured product has those of the stream that captured it."""
    return _counters(device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)


@cache
def _counters(device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)
