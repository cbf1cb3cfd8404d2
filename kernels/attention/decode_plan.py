"""How a decode step's keys are shared out over the GPU: pieces of about equal length, one program each and KV head.

A split count common to all requests leaves a long request's programs running when those of the short ones have ended.
So the piece's length is what is common: all tokens of the batch over the programs wanted, and each request is cut into
as many equal pieces as come nearest to that (the scheduling of FlashInfer's plan, but on the device: a CUDA graph that
holds the kernel finds other lengths in every replay). Grids are fixed by a bound on the number of pieces; programs
beyond the last piece end at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .. import reference
from .._triton import runs_triton, tl, triton

# Two programs fit a multiprocessor; four turns of them leave an eighth of a turn idle at the end, on average.
PROGRAMS_PER_PROCESSOR = 8
# A shorter piece's start-up and join cost more than what it takes off the others.
SHORTEST_PIECE = 256
_INTERPRETER_PROCESSORS = 8


@dataclass(frozen=True)
class DecodePlan:
    """``owners`` [most pieces] int32: the request of each piece, arbitrary beyond the last; request b's pieces are
    ``firsts[b]:firsts[b + 1]``, ``firsts`` [B + 1] int32. ``joins``: some request may have more than one."""

    owners: torch.Tensor
    firsts: torch.Tensor
    joins: bool


@triton.jit
def _counts(length, piece, real):
    return tl.where(real, tl.maximum((length + piece // 2) // piece, 1), 0)


@triton.jit(do_not_specialize=["requests", "wanted"])
def _plan_decode_kernel(kv_indptr_ptr, last_page_len_ptr, owners_ptr, firsts_ptr, requests, wanted,
                        TURNS: tl.constexpr, PAGE: tl.constexpr, SHORTEST: tl.constexpr, BLOCK: tl.constexpr,
                        WINDOW: tl.constexpr):
    request = tl.arange(0, BLOCK)
    real = request < requests
    pages = (tl.load(kv_indptr_ptr + request + 1, real, other=0) - tl.load(kv_indptr_ptr + request, real, other=0))
    length = tl.where(real, (pages - 1) * PAGE + tl.load(last_page_len_ptr + request, real, other=0), 0)
    if WINDOW:
        length = tl.minimum(length, WINDOW)
    share = tl.cdiv(tl.sum(length, 0), wanted)
    count = _counts(length, tl.maximum(share, SHORTEST), real)
    longest = tl.max(tl.cdiv(length, tl.maximum(count, 1)), 0)
    # What all programs take in whole turns, against an eighth more than their shares.
    uneven = tl.cdiv(tl.sum(count, 0), wanted) * longest > share + share // 8
    piece = tl.where(uneven, tl.cdiv(share, TURNS), share)
    count = _counts(length, tl.maximum(piece, SHORTEST), real)
    end = tl.cumsum(count, 0)
    tl.store(firsts_ptr + request, end - count, real)
    tl.store(firsts_ptr + requests, tl.sum(count, 0))
    for i in range(tl.max(count, 0)):
        tl.store(owners_ptr + end - count + i, request, real & (i < count))


@triton.jit
def span_of(piece, owners_ptr, firsts_ptr, kv_indptr_ptr, last_page_len_ptr, PAGE: tl.constexpr,
            BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr = 0):
    """``(request, its number of pieces, place of its first page, first token, token behind the last)`` of a piece."""
    # Past the first-level cache, which may hold the step before's where this is read before the kernel ahead has ended.
    request = tl.load(owners_ptr + piece, cache_modifier=".cg").to(tl.int64)
    first_piece = tl.load(firsts_ptr + request, cache_modifier=".cg")
    pieces = tl.load(firsts_ptr + request + 1, cache_modifier=".cg") - first_piece
    first_page = tl.load(kv_indptr_ptr + request, cache_modifier=".cg")
    pages = tl.load(kv_indptr_ptr + request + 1, cache_modifier=".cg") - first_page
    length = (pages - 1) * PAGE + tl.load(last_page_len_ptr + request, cache_modifier=".cg")
    unseen = 0
    if WINDOW:
        unseen = tl.maximum(length - WINDOW, 0)
        length -= unseen
    blocks = tl.cdiv(length, BLOCK_TOKENS)
    place = piece - first_piece
    begin = blocks * place // pieces * BLOCK_TOKENS
    end = tl.minimum(blocks * (place + 1) // pieces * BLOCK_TOKENS, length)
    if WINDOW:
        begin += unseen
        end += unseen
    return request, pieces, first_page, begin, end


@functools.cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; what the interpreter plans for on a CPU."""
    if device.type != "cuda":
        return _INTERPRETER_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_decode(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, num_kv_heads: int,
                processors: int, longest: int, *, programs: int = PROGRAMS_PER_PROCESSOR,
                shortest: int = SHORTEST_PIECE, turns: int = 1, window: int | None = None) -> DecodePlan:
    """The plan of a decode batch: ``kv_indptr`` [B + 1] and ``kv_last_page_len`` [B] int32, in FlashInfer's form.

    About ``programs * processors`` programs over ``num_kv_heads``; pieces of ``shortest`` tokens (64 or more) at
    least. Where pieces of that length fill them badly, for lengths are mixed, there are up to ``turns`` times as many.
    No request is longer than ``longest``, in this batch and in the replays of a graph that captures this. With
    ``window`` the last so many tokens of each are shared out, and the others not looked at.
    """
    requests = len(kv_last_page_len)
    wanted = max(1, programs * processors // num_kv_heads)
    longest = min(longest, window or longest)
    # A request of n and a half pieces has n + 1 at most: one for each request, and the whole over a piece's length.
    owners = torch.empty(requests + turns * wanted, dtype=torch.int32, device=kv_indptr.device)
    firsts = torch.empty(requests + 1, dtype=torch.int32, device=kv_indptr.device)
    if runs_triton(kv_indptr):
        _plan_decode_kernel[(1,)](kv_indptr, kv_last_page_len, owners, firsts, requests, wanted, TURNS=turns,
                                  PAGE=page_size, SHORTEST=shortest,
                                  BLOCK=max(16, triton.next_power_of_2(requests)), WINDOW=window or 0)
    else:
        reference.plan_decode(kv_indptr, kv_last_page_len, owners, firsts, page_size, wanted, shortest, turns, window)
    return DecodePlan(owners, firsts, joins=2 * longest >= 3 * shortest)
