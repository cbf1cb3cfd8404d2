"""Merges the attention results of a request's splits by their log-sum-exps."""

from __future__ import annotations

import torch

from .._triton import pdl, start_next, tl, triton, wait_for_last
from .decode_plan import DecodePlan

_SPLITS_AT_ONCE = 16
"""Splits that one iteration merges, for each of a warp's 128 values: all of their loads are in flight at once."""


@triton.jit
def _merge_splits_kernel(part_ptr, lse_ptr, out_ptr, split_indptr_ptr, num_q_heads, DIM: tl.constexpr,
                         BLOCK_DIM: tl.constexpr, BLOCK_SPLITS: tl.constexpr, INPUTS_READY: tl.constexpr,
                         PDL: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    start_next(PDL)
    if not INPUTS_READY:
        wait_for_last(PDL)
    first = tl.load(split_indptr_ptr + request, cache_modifier=".cg")
    splits = tl.load(split_indptr_ptr + request + 1, cache_modifier=".cg") - first
    if INPUTS_READY:
        # One program always waits: the next kernel starts when this one ends, and reads the previous one's results.
        if (splits == 1) & (request + head > 0):
            return
        wait_for_last(PDL)
    if splits == 1:
        return
    dim = tl.arange(0, BLOCK_DIM)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_DIM,), tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        there = split < splits
        row = (first + split).to(tl.int64) * num_q_heads + head
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


def merge_splits(parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, plan: DecodePlan,
                 inputs_ready: bool = False) -> None:
    """Merges ``parts`` [most splits, H, D] float32, normalised, by ``lses`` [most splits, H] (base 2) into ``out``
    [B, H, D], for requests that have several; all contiguous, on a GPU. ``inputs_ready``: the plan was written before
    the last launch without PDL (kernels/_triton.py)."""
    requests, heads, dim = out.shape
    block_dim = max(16, triton.next_power_of_2(dim))
    # One warp a program, where that holds a head: there are many more heads than SMs, and most have one split when
    # there are many requests.
    _merge_splits_kernel[(requests, heads)](parts, lses, out, plan.split_indptr, heads, DIM=dim, BLOCK_DIM=block_dim,
                                           BLOCK_SPLITS=_SPLITS_AT_ONCE, INPUTS_READY=inputs_ready,
                                           num_warps=max(1, min(8, block_dim // 128)), **pdl(parts))
