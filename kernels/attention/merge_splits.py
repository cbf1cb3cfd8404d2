"""The second half of attention over pieces of sequences: a request's pieces, joined by their log-sum-exps."""

from __future__ import annotations

import torch

from .._triton import pdl, start_next, tl, triton, wait_for_last
from .decode_plan import DecodePlan

# Pieces that are joined in one turn, for each of a warp's 128 values: all of them are under way at once.
_PIECES = 16


@triton.jit
def _join_pieces_kernel(part_ptr, lse_ptr, out_ptr, firsts_ptr, num_q_heads, DIM: tl.constexpr,
                        BLOCK_DIM: tl.constexpr, BLOCK_PIECES: tl.constexpr, SETTLED: tl.constexpr,
                        PDL: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    start_next(PDL)
    if not SETTLED:
        wait_for_last(PDL)
    first = tl.load(firsts_ptr + request, cache_modifier=".cg")
    pieces = tl.load(firsts_ptr + request + 1, cache_modifier=".cg") - first
    if SETTLED:
        # One program waits in any case: the kernel behind starts when this ends, and reads what the one ahead wrote.
        if (pieces == 1) & (request + head > 0):
            return
        wait_for_last(PDL)
    if pieces == 1:
        return
    dim = tl.arange(0, BLOCK_DIM)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_DIM,), tl.float32)
    for start in range(0, pieces, BLOCK_PIECES):
        piece = start + tl.arange(0, BLOCK_PIECES)
        there = piece < pieces
        row = (first + piece).to(tl.int64) * num_q_heads + head
        lse = tl.load(lse_ptr + row, there, other=float("-inf"))
        parts = tl.load(part_ptr + row[:, None] * DIM + dim[None, :], there[:, None] & (dim < DIM)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top)
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (request * num_q_heads + head) * DIM + dim, out, dim < DIM)


def join_pieces(parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, plan: DecodePlan,
                settled: bool = False) -> None:
    """``parts`` [most pieces, H, D] float32, normalised, and ``lses`` [most pieces, H] (base 2), of the requests that
    have more than one, into ``out`` [B, H, D]; all contiguous, on a GPU. ``settled``: the plan was written before the
    last launch without PDL (kernels/_triton.py)."""
    requests, heads, dim = out.shape
    block_dim = max(16, triton.next_power_of_2(dim))
    # One warp a program, where that holds a head: there are many more heads than multiprocessors, and most have one
    # piece when requests are many.
    _join_pieces_kernel[(requests, heads)](parts, lses, out, plan.firsts, heads, DIM=dim, BLOCK_DIM=block_dim,
                                           BLOCK_PIECES=_PIECES, SETTLED=settled,
                                           num_warps=max(1, min(8, block_dim // 128)), **pdl(parts))
