"""Applies attention sinks to finished attention: a logit that joins a softmax's denominator only scales the result."""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last

_ROWS = 16


@triton.jit(do_not_specialize=["rows"])
def _scale_by_sinks_kernel(out_ptr, lse_ptr, sinks_ptr, rows, HEADS: tl.constexpr, DIM: tl.constexpr,
                           BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    there = row < rows
    dim = tl.arange(0, BLOCK_DIM)
    sink = tl.load(sinks_ptr + row % HEADS) * 1.4426950408889634
    share = 1.0 / (1.0 + tl.exp2(sink - tl.load(lse_ptr + row, there, other=0.0)))
    at = out_ptr + row.to(tl.int64)[:, None] * DIM + dim[None, :]
    inside = there[:, None] & (dim < DIM)[None, :]
    out = tl.load(at, inside, other=0.0).to(tl.float32) * share[:, None]
    tl.store(at, out.to(out_ptr.dtype.element_ty), inside)


def scale_by_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Multiplies ``out`` [T, H, D], contiguous, by ``exp(lse) / (exp(lse) + exp(sink))`` in place. ``lse`` [T, H]
    float32 are the log-sum-exps of the attention scores, to base 2; ``sinks`` [H] float32, to base e."""
    if not runs_triton(out):
        reference.scale_by_sinks(out, lse, sinks)
        return
    tokens, heads, dim = out.shape
    if tokens:
        _scale_by_sinks_kernel[(triton.cdiv(tokens * heads, _ROWS),)](
            out, lse, sinks, tokens * heads, HEADS=heads, DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim),
            BLOCK_ROWS=_ROWS, **pdl(out))
