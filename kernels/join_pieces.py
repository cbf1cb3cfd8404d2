"""The second half of attention over pieces of sequences: a request's pieces, joined by their log-sum-exps."""

from __future__ import annotations

import torch

from ._triton import pdl, start_next, tl, triton, wait_for_last
from .decode_plan import DecodePlan


@triton.jit
def joined(part_ptr, lse_ptr, first, pieces, heads, num_q_heads, in_group, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
           BLOCK_PIECES: tl.constexpr, STAGES: tl.constexpr):
    """Pieces ``[first, first + pieces)`` of ``heads`` [n], where ``in_group``: values [n, BLOCK_DIM].

    In the order of the pieces, whoever calls it. Reads past the first-level caches: the parts may be this launch's.
    """
    dim = tl.arange(0, BLOCK_DIM)
    top = tl.full((heads.shape[0], 1), float("-inf"), tl.float32)
    total = tl.zeros((heads.shape[0], 1), tl.float32)
    acc = tl.zeros((heads.shape[0], BLOCK_DIM), tl.float32)
    # Some turns' parts are under way at a time: each takes as long as all of a turn's arithmetic.
    for start in tl.range(0, pieces, BLOCK_PIECES, num_stages=STAGES):
        piece = start + tl.arange(0, BLOCK_PIECES)
        row = ((first + piece).to(tl.int64)[:, None] * num_q_heads + heads[None, :])[:, :, None]
        there = ((piece < pieces)[:, None] & in_group[None, :])[:, :, None]
        parts = tl.load(part_ptr + row * DIM + dim[None, None, :], there & (dim < DIM)[None, None, :], other=0.0,
                        cache_modifier=".cg")
        lse = tl.load(lse_ptr + row, there, other=float("-inf"), cache_modifier=".cg")
        lse = tl.where(in_group[None, :, None], lse, 0.0)  # a head that is not there has no level, and no NaN
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top[None, :, :])
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink + tl.sum(parts * weights, 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    return acc / total


@triton.jit
def _join_pieces_kernel(part_ptr, lse_ptr, out_ptr, firsts_ptr, num_q_heads, DIM: tl.constexpr,
                        BLOCK_DIM: tl.constexpr, BLOCK_PIECES: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(firsts_ptr + request)
    pieces = tl.load(firsts_ptr + request + 1) - first
    if pieces == 1:
        return
    heads = head + tl.arange(0, 1)
    dim = tl.arange(0, BLOCK_DIM)
    out = joined(part_ptr, lse_ptr, first, pieces, heads, num_q_heads, heads < num_q_heads, DIM, BLOCK_DIM,
                 BLOCK_PIECES, 2)
    row = request * num_q_heads + heads
    tl.store(out_ptr + row[:, None] * DIM + dim[None, :], out.to(out_ptr.dtype.element_ty), (dim < DIM)[None, :])


def join_pieces(parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, plan: DecodePlan) -> None:
    """``parts`` [most pieces, H, D] float32, normalised, and ``lses`` [most pieces, H] (base 2), of the requests that
    have more than one, into ``out`` [B, H, D]; all contiguous, on a GPU."""
    requests, heads, dim = out.shape
    _join_pieces_kernel[(requests, heads)](
        parts, lses, out, plan.firsts, heads, DIM=dim, BLOCK_DIM=max(16, triton.next_power_of_2(dim)), BLOCK_PIECES=8,
        **pdl(parts))
