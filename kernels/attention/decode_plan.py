"""Plans how a decode step's keys are split among programs: splits of about equal length, one a program and KV head.

A number of splits common to all requests leaves a long request's programs running when those of short ones have ended.
So a split's length is common: all tokens of the batch divided by the programs to fill, and each request is cut into the
number of equal splits that comes nearest to it (the scheduling of FlashInfer's plan, but on the device: a CUDA graph
that holds the kernel finds other lengths in every replay). Grids are fixed by a bound on the number of splits; programs
after the last split end at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import reference
from .._triton import runs_triton, tl, triton
from ..tuning.attention import DecodeSplits

_USUAL = DecodeSplits()



@dataclass(frozen=True)
class DecodePlan:
    """``request_of_split`` [most splits] int32, arbitrary after the last one; request b has the splits
    ``split_indptr[b]:split_indptr[b + 1]``, int32 [B + 1]. ``needs_merge``: some request may have more than one."""

    request_of_split: torch.Tensor
    split_indptr: torch.Tensor
    needs_merge: bool


@triton.jit
def _counts(length, split, real):
    return tl.where(real, tl.maximum((length + split // 2) // split, 1), 0)


@triton.jit(do_not_specialize=["requests", "programs"])
def _plan_decode_kernel(kv_indptr_ptr, last_page_len_ptr, request_of_split_ptr, split_indptr_ptr, requests, programs,
                        MAX_ROUNDS: tl.constexpr, PAGE: tl.constexpr, MIN_TOKENS: tl.constexpr, BLOCK: tl.constexpr,
                        WINDOW: tl.constexpr):
    request = tl.arange(0, BLOCK)
    real = request < requests
    pages = (tl.load(kv_indptr_ptr + request + 1, real, other=0) - tl.load(kv_indptr_ptr + request, real, other=0))
    length = tl.where(real, (pages - 1) * PAGE + tl.load(last_page_len_ptr + request, real, other=0), 0)
    if WINDOW:
        length = tl.minimum(length, WINDOW)
    if MAX_ROUNDS:
        share = tl.cdiv(tl.sum(length, 0), programs)
        count = _counts(length, tl.maximum(share, MIN_TOKENS), real)
        longest = tl.max(tl.cdiv(length, tl.maximum(count, 1)), 0)
        # The time of all programs in whole rounds, compared with an eighth more than their shares.
        uneven = tl.cdiv(tl.sum(count, 0), programs) * longest > share + share // 8
        split = tl.where(uneven, tl.cdiv(share, MAX_ROUNDS), share)
        count = _counts(length, tl.maximum(split, MIN_TOKENS), real)
    else:
        count = tl.minimum(_counts(length, MIN_TOKENS, real), programs)
    end = tl.cumsum(count, 0)
    tl.store(split_indptr_ptr + request, end - count, real)
    tl.store(split_indptr_ptr + requests, tl.sum(count, 0))
    for i in range(tl.max(count, 0)):
        tl.store(request_of_split_ptr + end - count + i, request, real & (i < count))


@triton.jit
def split_range(split, request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr, last_page_len_ptr, PAGE: tl.constexpr,
                BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr = 0):
    """``(request, its number of splits, index of its first page, first token, end token)`` of a split."""
    # Not from the L1 cache, which may hold the last step's where this is read before the previous kernel has ended.
    request = tl.load(request_of_split_ptr + split, cache_modifier=".cg").to(tl.int64)
    first_split = tl.load(split_indptr_ptr + request, cache_modifier=".cg")
    splits = tl.load(split_indptr_ptr + request + 1, cache_modifier=".cg") - first_split
    first_page = tl.load(kv_indptr_ptr + request, cache_modifier=".cg")
    pages = tl.load(kv_indptr_ptr + request + 1, cache_modifier=".cg") - first_page
    length = (pages - 1) * PAGE + tl.load(last_page_len_ptr + request, cache_modifier=".cg")
    unseen = 0
    if WINDOW:
        unseen = tl.maximum(length - WINDOW, 0)
        length -= unseen
    blocks = tl.cdiv(length, BLOCK_TOKENS)
    index = split - first_split
    begin = blocks * index // splits * BLOCK_TOKENS
    end = tl.minimum(blocks * (index + 1) // splits * BLOCK_TOKENS, length)
    if WINDOW:
        begin += unseen
        end += unseen
    return request, splits, first_page, begin, end


def plan_decode(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, num_kv_heads: int,
                num_sms: int, longest: int, *, programs_per_sm: int = _USUAL.programs_per_sm,
                min_tokens: int = _USUAL.min_tokens, max_rounds: int = _USUAL.max_rounds,
                window: int | None = None) -> DecodePlan:
    """Plans a decode batch: ``kv_indptr`` [B + 1] and ``kv_last_page_len`` [B] int32, in FlashInfer's form.

    There are about ``programs_per_sm * num_sms`` programs over ``num_kv_heads``; splits have ``min_tokens`` tokens (64
    or more) at least. Where they fill the programs badly, for lengths are mixed, there are up to ``max_rounds`` times
    as many; with 0 rounds each request has up to ``programs_per_sm``, by its own length alone. No request is longer
    than ``longest``, in this batch and in the replays of a graph that captures this. With ``window`` only the last
    ``window`` tokens of each request are split.
    """
    requests = len(kv_last_page_len)
    programs = max(1, programs_per_sm * num_sms // num_kv_heads) if max_rounds else programs_per_sm
    longest = min(longest, window or longest)
    # A request of n and a half splits has n + 1 at most: one for each request, and the whole over a split's length.
    max_splits = requests + max_rounds * programs if max_rounds else requests * programs
    request_of_split = torch.empty(max_splits, dtype=torch.int32, device=kv_indptr.device)
    split_indptr = torch.empty(requests + 1, dtype=torch.int32, device=kv_indptr.device)
    if runs_triton(kv_indptr):
        _plan_decode_kernel[(1,)](kv_indptr, kv_last_page_len, request_of_split, split_indptr, requests, programs,
                                  MAX_ROUNDS=max_rounds, PAGE=page_size, MIN_TOKENS=min_tokens,
                                  BLOCK=max(16, triton.next_power_of_2(requests)), WINDOW=window or 0)
    else:
        reference.plan_decode(kv_indptr, kv_last_page_len, request_of_split, split_indptr, page_size, programs,
                              min_tokens, max_rounds, window)
    return DecodePlan(request_of_split, split_indptr, needs_merge=2 * longest >= 3 * min_tokens)
