"""Plans which requests of a decode step read a part of their tokens: on the device, so that a CUDA graph that holds the
kernel finds other lengths in every replay."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .. import reference
from .._triton import runs_triton, tl, triton

SCORE_BLOCK = 16
"""Tokens of a block of scores: each request's begin with a block of their own. 32 bytes, a sector of memory."""


class TokenScores(NamedTuple):
    """Scores of tokens, ``values`` [H, capacity] float16, and the largest of each block, ``maxima``
    [H, capacity / SCORE_BLOCK] float16."""

    values: torch.Tensor
    maxima: torch.Tensor

    @classmethod
    def empty(cls, heads: int, capacity: int, device: torch.device) -> TokenScores:
        """Makes room for ``capacity`` tokens, rounded up to whole blocks."""
        blocks = -(-capacity // SCORE_BLOCK)
        return cls(*(torch.empty(heads, size, dtype=torch.float16, device=device)
                     for size in (blocks * SCORE_BLOCK, blocks)))


class SparseDecodePlan(NamedTuple):
    """Request b reads a part of its ``lengths[b]`` tokens, or all of them where that is 0 ([B] int32). Their scores
    begin at ``score_indptr[b]`` ([B + 1] int32), a multiple of SCORE_BLOCK. Two page tables with the batch's pages and
    other ``kv_last_page_len`` [B] int32: by that of ``exact`` a request that reads a part has one token, by that of
    ``sparse`` one that reads all."""

    lengths: torch.Tensor
    score_indptr: torch.Tensor
    exact: torch.Tensor
    sparse: torch.Tensor

    @classmethod
    def empty(cls, requests: int, device: torch.device) -> SparseDecodePlan:
        """Makes a plan for ``plan_sparse_decode`` to fill."""
        sizes = (requests, requests + 1, requests, requests)
        return cls(*(torch.empty(size, dtype=torch.int32, device=device) for size in sizes))


@triton.jit(do_not_specialize=["requests", "threshold", "capacity"])
def _plan_sparse_decode_kernel(kv_indptr_ptr, last_page_len_ptr, lengths_ptr, score_indptr_ptr, exact_ptr, sparse_ptr,
                               requests, threshold, capacity, PAGE: tl.constexpr, SCORE_BLOCK: tl.constexpr,
                               BLOCK: tl.constexpr):
    request = tl.arange(0, BLOCK)
    real = request < requests
    pages = tl.load(kv_indptr_ptr + request + 1, real, other=0) - tl.load(kv_indptr_ptr + request, real, other=0)
    last = tl.load(last_page_len_ptr + request, real, other=0)
    length = tl.where(real, (pages - 1) * PAGE + last, 0)
    long = length > threshold
    room = tl.cdiv(length, SCORE_BLOCK) * SCORE_BLOCK
    sparse = long & (tl.cumsum(tl.where(long, room, 0), 0) <= capacity)
    one_token = 1 - (pages - 1) * PAGE
    tl.store(exact_ptr + request, tl.where(sparse, one_token, last), real)
    tl.store(sparse_ptr + request, tl.where(sparse, last, one_token), real)
    tl.store(lengths_ptr + request, tl.where(sparse, length, 0), real)
    tl.store(score_indptr_ptr + request + 1, tl.cumsum(tl.where(sparse, room, 0), 0), real)
    tl.store(score_indptr_ptr, 0)


def plan_sparse_decode(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, threshold: int,
                       capacity: int, plan: SparseDecodePlan) -> None:
    """Fills in ``plan``: requests of more than ``threshold`` tokens read a part of them, as long as all scores up to
    theirs fit ``capacity``. ``kv_indptr`` [B + 1] and ``kv_last_page_len`` [B] are int32, in FlashInfer's form."""
    if not runs_triton(kv_indptr):
        reference.plan_sparse_decode(kv_indptr, kv_last_page_len, page_size, threshold, capacity, *plan)
        return
    requests = len(kv_last_page_len)
    _plan_sparse_decode_kernel[(1,)](kv_indptr, kv_last_page_len, *plan, requests, threshold, capacity, PAGE=page_size,
                                     SCORE_BLOCK=SCORE_BLOCK, BLOCK=max(16, triton.next_power_of_2(requests)))
