"""Products cut into pieces along the depth: the program that comes last adds up what all have left."""

from __future__ import annotations

from functools import lru_cache

import torch

from .._triton import tl, triton


@triton.jit
def last_piece(acc, part_ptr, count_ptr, program, piece, pieces, size, place, inside):
    """``(whether this program is the last of the tile's, the tile's sum if so)``.

    ``acc`` is this piece's tile, of ``size`` values in all tiles together; its values' places among them are ``place``.
    Pieces are added in their order, whoever comes last: no race decides a sum.
    """
    tl.store(part_ptr + piece.to(tl.int64) * size + place, acc, inside)
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr + program, 1, sem="acq_rel") == pieces - 1
    if last:
        tl.store(count_ptr + program, 0)
        acc = tl.zeros(acc.shape, tl.float32)
        for other in range(pieces):
            acc += tl.load(part_ptr + tl.cast(other, tl.int64) * size + place, inside, other=0.0, cache_modifier=".cg")
    return last, acc


@lru_cache
def counts_of(device: torch.device) -> torch.Tensor:
    """How many of a tile's pieces are there: zeros between launches, which the last piece leaves. Products of one
    device follow each other on one stream, so that they share them."""
    return torch.zeros(1 << 14, dtype=torch.int32, device=device)
