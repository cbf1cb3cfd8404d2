"""The second half of attention over pieces of sequences: a request's pieces, joined by their log-sum-exps."""

from __future__ import annotations

import torch

from ._triton import tl, triton
from .decode_plan import DecodePlan


@triton.jit
def _join_pieces_kernel(part_ptr, lse_ptr, out_ptr, firsts_ptr, num_q_heads, DIM: tl.constexpr,
                        BLOCK_DIM: tl.constexpr, BLOCK_PIECES: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(firsts_ptr + request)
    pieces = tl.load(firsts_ptr + request + 1) - first
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
        new_top = tl.maximum(top, tl.max(lse, 0))
        weights = tl.exp2(lse - new_top)
        shrink = tl.exp2(top - new_top)
        parts = tl.load(part_ptr + row[:, None] * DIM + dim[None, :], there[:, None] & (dim < DIM)[None, :], other=0.0)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (request * num_q_heads + head) * DIM + dim, out, dim < DIM)


def join_pieces(parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, plan: DecodePlan) -> None:
    """``parts`` [most pieces, H, D] float32, normalised, and ``lses`` [most pieces, H] (base 2), of the requests that
    have more than one, into ``out`` [B, H, D]; all contiguous, on a GPU."""
    requests, heads, dim = out.shape
    _join_pieces_kernel[(requests, heads)](parts, lses, out, plan.firsts, heads, DIM=dim,
                                           BLOCK_DIM=max(16, triton.next_power_of_2(dim)), BLOCK_PIECES=16)
