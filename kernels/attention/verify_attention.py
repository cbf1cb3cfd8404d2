"""Attention of a few query rows a request over its pages: the rows of drafts that one step verifies.

As in paged_decode.py the keys are cut into splits of about equal length, and a small kernel merges them by their
log-sum-exps. A program takes a block of a request's rows with all query heads of one KV head, as the rows of one tile,
so that keys are read once for all drafts. Rows of a chain see the tokens up to their own. Drafts that form a tree have
a word each instead, whose bits say which of the request's newest slots the row sees: its ancestors' and its own.

Requests may have different numbers of rows. The grid depends on bounds only, and lengths are read on the device: a
CUDA graph that holds the kernel finds others in every replay. Under the ``batch_invariant`` policy each row is a block
of its own and is split by its own length alone, as ``paged_decode`` splits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..arguments import RowMask
from ..tuning.attention import DecodeSplits, VerifyTile
from ..tuning.policy import policy_of
from .decode_plan import DecodePlan, plan_decode
from .float8_words import load_quarters, merge_quarters, reads_words
from .paged_decode import prefetch_tiles
from .row_mask import popcount, sees
from .soft_cap import soft_cap

_SPLITS_AT_ONCE = 16
_WORD_BITS = 64


@dataclass(frozen=True)
class VerifyPlan:
    """``rows`` of a request are a block, ``blocks_per_request`` of which cover the most rows. ``length_indptr``
    [blocks + 1] int32: the sums of the lengths that blocks see; ``splits``: those of these lengths."""

    rows: int
    blocks_per_request: int
    length_indptr: torch.Tensor
    splits: DecodePlan


@triton.jit(do_not_specialize=["blocks"])
def _block_lengths_kernel(qo_indptr_ptr, kv_indptr_ptr, last_page_len_ptr, length_indptr_ptr, blocks,
                          PAGE: tl.constexpr, ROWS: tl.constexpr, PER_REQUEST: tl.constexpr, MASKED: tl.constexpr,
                          BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    real = block < blocks
    request = block // PER_REQUEST
    first_row = block % PER_REQUEST * ROWS
    count = tl.load(qo_indptr_ptr + request + 1, real, other=0) - tl.load(qo_indptr_ptr + request, real, other=0)
    pages = tl.load(kv_indptr_ptr + request + 1, real, other=0) - tl.load(kv_indptr_ptr + request, real, other=0)
    length = (pages - 1) * PAGE + tl.load(last_page_len_ptr + request, real, other=0)
    if not MASKED:
        length = length - count + tl.minimum(first_row + ROWS, count)
    length = tl.where(real & (first_row < count), length, 0)
    tl.store(length_indptr_ptr + block + 1, tl.cumsum(length, 0), real)
    tl.store(length_indptr_ptr + block, 0, block == 0)


@triton.jit
def block_of_split(split, block_of_split_ptr, split_indptr_ptr, length_indptr_ptr):
    """``(block, its first split, number of splits, length that it sees)``: all may be read while the previous kernel
    runs, if that wrote none of it."""
    block = tl.load(block_of_split_ptr + split, cache_modifier=".cg").to(tl.int64)
    first_split = tl.load(split_indptr_ptr + block, cache_modifier=".cg")
    splits = tl.load(split_indptr_ptr + block + 1, cache_modifier=".cg") - first_split
    begin = tl.load(length_indptr_ptr + block, cache_modifier=".cg")
    return block, first_split, splits, tl.load(length_indptr_ptr + block + 1, cache_modifier=".cg") - begin


@triton.jit
def rows_of_block(block, qo_indptr_ptr, kv_indptr_ptr, last_page_len_ptr, PAGE: tl.constexpr, ROWS: tl.constexpr,
                  PER_REQUEST: tl.constexpr):
    """``(first row within the request, the request's first row of all, its number of rows, index of its first page, its
    length)`` of a block's request."""
    request = block // PER_REQUEST
    first_token = tl.load(qo_indptr_ptr + request, cache_modifier=".cg")
    count = tl.load(qo_indptr_ptr + request + 1, cache_modifier=".cg") - first_token
    first_page = tl.load(kv_indptr_ptr + request, cache_modifier=".cg")
    pages = tl.load(kv_indptr_ptr + request + 1, cache_modifier=".cg") - first_page
    length = (pages - 1) * PAGE + tl.load(last_page_len_ptr + request, cache_modifier=".cg")
    return (block % PER_REQUEST * ROWS).to(tl.int32), first_token, count, first_page, length


@triton.jit
def _seen_scores(scores, token, present, visible, word, masked_from, WORDS_OF_ROWS: tl.constexpr,
                 WINDOW: tl.constexpr):
    """``scores`` of a tile, minus infinity where a row does not see the token."""
    if not WORDS_OF_ROWS:
        seen = token[None, :] < visible[:, None]
        if WINDOW:
            seen = seen & (token[None, :] >= visible[:, None] - WINDOW)
    else:
        seen = present[None, :] & sees(word[:, None], token[None, :], masked_from)
        if WINDOW:
            position = (masked_from + popcount(word) - 1).to(tl.int32)
            seen = seen & ((token[None, :] > position[:, None] - WINDOW) | (token[None, :] >= masked_from))
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _add_tokens(q, acc, acc_1, acc_2, acc_3, top, total, page, begin, end, visible, word, masked_from, k_pages_ptr,
                v_pages_ptr, indices_ptr, stride_page, stride_slot, scale_log2, WORDS_OF_ROWS: tl.constexpr,
                PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
                WINDOW: tl.constexpr, WORDS: tl.constexpr, CAP: tl.constexpr):
    """Add tokens ``[begin, end)`` to the running softmax; ``page`` has the pages of the first tile. Row r sees those
    below ``visible[r]``, or with WORDS_OF_ROWS those below ``masked_from`` and those of its ``word``; with ``WINDOW``
    the last of them."""
    dim = tl.arange(0, BLOCK_DIM)
    offset = tl.arange(0, BLOCK_TOKENS)
    if not WORDS_OF_ROWS:
        visible = tl.minimum(visible, end)
    for start in range(begin, end, BLOCK_TOKENS):
        token = start + offset
        present = token < end
        slot = page.to(tl.int64) * stride_page + (token % PAGE) * stride_slot
        address = slot[:, None] + dim[None, :]
        inside = present[:, None] & (dim < DIM)[None, :]
        # The next iteration's: loads of keys that wait for page ids in their own iteration are never pipelined.
        page = tl.load(indices_ptr + (token + BLOCK_TOKENS) // PAGE, token + BLOCK_TOKENS < end, other=0)
        k = tl.load(k_pages_ptr + address, inside, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if CAP > 0.0:
            scores = soft_cap(scores, CAP)
        # A comparison a score costs a chain nothing, and words are read in the tiles that have bits alone. A second
        # loop for these tiles would wait for its first keys with nothing else in flight.
        if WORDS_OF_ROWS and not WINDOW:
            if start + BLOCK_TOKENS > tl.minimum(masked_from, end):
                scores = _seen_scores(scores, token, present, visible, word, masked_from, WORDS_OF_ROWS, WINDOW)
        else:
            scores = _seen_scores(scores, token, present, visible, word, masked_from, WORDS_OF_ROWS, WINDOW)
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row may not have seen a key yet: less its top, minus infinity would be NaN.
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(top - level)
        if WORDS:
            v, v_1, v_2, v_3 = load_quarters(v_pages_ptr, slot, present, DIM, BLOCK_DIM)
            acc_1 = acc_1 * shrink[:, None] + tl.dot(weights.to(v.dtype), v_1)
            acc_2 = acc_2 * shrink[:, None] + tl.dot(weights.to(v.dtype), v_2)
            acc_3 = acc_3 * shrink[:, None] + tl.dot(weights.to(v.dtype), v_3)
        else:
            v = tl.load(v_pages_ptr + address, inside, other=0.0).to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    return acc, acc_1, acc_2, acc_3, top, total


@triton.jit(do_not_specialize=["blocks"])
def _verify_attention_kernel(q_ptr, k_pages_ptr, v_pages_ptr, sinks_ptr, words_ptr, counts_ptr, out_ptr, part_ptr,
                             lse_ptr, qo_indptr_ptr, kv_indptr_ptr, kv_indices_ptr, last_page_len_ptr,
                             length_indptr_ptr, block_of_split_ptr, split_indptr_ptr, blocks, scale_log2, v_scale,
                             q_stride_t, q_stride_h, stride_page, stride_head, stride_slot, num_q_heads,
                             PAGE: tl.constexpr, ROWS: tl.constexpr, PER_REQUEST: tl.constexpr, GROUP: tl.constexpr,
                             BLOCK_ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
                             BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr,
                             SINKS: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, HALF: tl.constexpr,
                             WORDS: tl.constexpr, AHEAD: tl.constexpr, INPUTS_READY: tl.constexpr, PDL: tl.constexpr):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    start_next(PDL)
    if not INPUTS_READY:
        wait_for_last(PDL)
    # If INPUTS_READY these do not wait: programs with tokens, of which there are some, do.
    if split >= tl.load(split_indptr_ptr + blocks, cache_modifier=".cg"):
        return
    block, first_split, splits, length = block_of_split(split, block_of_split_ptr, split_indptr_ptr, length_indptr_ptr)
    if length == 0:  # the request has fewer rows
        return
    first_row, first_token, count, first_page, whole = rows_of_block(block, qo_indptr_ptr, kv_indptr_ptr,
                                                                     last_page_len_ptr, PAGE, ROWS, PER_REQUEST)
    unseen = 0
    if WINDOW:
        unseen = tl.maximum(length - SPAN, 0)
    tiles = tl.cdiv(length - unseen, BLOCK_TOKENS)
    begin = tiles * (split - first_split) // splits * BLOCK_TOKENS + unseen
    end = tl.minimum(tiles * (split - first_split + 1) // splits * BLOCK_TOKENS + unseen, length)

    offset = tl.arange(0, BLOCK_TOKENS)
    page = tl.load(kv_indices_ptr + first_page + (begin + offset) // PAGE, begin + offset < end, other=0,
                   cache_modifier=".cg")
    if INPUTS_READY:
        prefetch_tiles(k_pages_ptr, v_pages_ptr, kv_indices_ptr + first_page, begin, end, kv_head * stride_head,
                       stride_page, stride_slot, PAGE, DIM, BLOCK_TOKENS, AHEAD)
        wait_for_last(PDL)

    row = tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    # Rows after the request's last see what that one sees, and are not stored.
    in_block = row // GROUP
    stored = (in_block < ROWS) & (first_row + in_block < count)
    token = tl.minimum(first_row + in_block, count - 1)
    query_row = (first_token + token).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    q = tl.load(q_ptr + (query_row * q_stride_t + head * q_stride_h)[:, None] + dim[None, :], (dim < DIM)[None, :],
                other=0.0)
    if HALF:
        q = q.to(tl.float16)
    if MASKED:
        masked_from = whole - tl.load(counts_ptr + block // PER_REQUEST)
        word = tl.load(words_ptr + query_row)
        visible = tl.zeros((BLOCK_ROWS,), tl.int32) + whole
    else:
        masked_from = 0
        word = query_row
        visible = whole - count + token + 1

    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    PARTS: tl.constexpr = 4 if WORDS else 1
    acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM // PARTS), tl.float32)
    # The values of words stay separate: value i of each word is summed up in the i-th.
    acc_1, acc_2, acc_3 = acc, acc, acc
    if SINKS:  # as a key whose value is zero, of the block's first split
        first = split == first_split
        top = tl.where(first, tl.load(sinks_ptr + head) * 1.4426950408889634, top)
        total = tl.where(first, 1.0, total)
    k_pages_ptr += kv_head * stride_head
    v_pages_ptr += kv_head * stride_head
    acc, acc_1, acc_2, acc_3, top, total = _add_tokens(
        q, acc, acc_1, acc_2, acc_3, top, total, page, begin, end, visible, word, masked_from, k_pages_ptr,
        v_pages_ptr, kv_indices_ptr + first_page, stride_page, stride_slot, scale_log2, MASKED, PAGE, DIM, BLOCK_DIM,
        BLOCK_TOKENS, WINDOW, WORDS, CAP)
    if WORDS:
        acc = merge_quarters(acc, acc_1, acc_2, acc_3)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None] * v_scale
    inside = stored[:, None] & (dim < DIM)[None, :]
    if splits == 1:
        out = out_ptr + (query_row * num_q_heads + head)[:, None] * DIM + dim[None, :]
        tl.store(out, result.to(out_ptr.dtype.element_ty), inside)
    else:  # a row may see nothing of a split: its weight is zero then
        at = (split.to(tl.int64) * ROWS + in_block) * num_q_heads + head
        tl.store(lse_ptr + at, tl.where(total == 0.0, float("-inf"), top + tl.log2(total)), stored)
        tl.store(part_ptr + at[:, None] * DIM + dim[None, :], result, inside)


@triton.jit
def _merge_rows_kernel(part_ptr, lse_ptr, out_ptr, qo_indptr_ptr, split_indptr_ptr, num_q_heads, ROWS: tl.constexpr,
                       PER_REQUEST: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
                       BLOCK_SPLITS: tl.constexpr, INPUTS_READY: tl.constexpr, PDL: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    row_and_head = tl.program_id(1)
    start_next(PDL)
    if not INPUTS_READY:
        wait_for_last(PDL)
    first = tl.load(split_indptr_ptr + block, cache_modifier=".cg")
    splits = tl.load(split_indptr_ptr + block + 1, cache_modifier=".cg") - first
    first_token = tl.load(qo_indptr_ptr + block // PER_REQUEST, cache_modifier=".cg")
    token = first_token + block % PER_REQUEST * ROWS + row_and_head // num_q_heads
    idle = (splits == 1) | (token >= tl.load(qo_indptr_ptr + block // PER_REQUEST + 1, cache_modifier=".cg"))
    if INPUTS_READY:
        # One program always waits: the next kernel starts when this one ends, and reads the previous one's results.
        if idle & (block + row_and_head > 0):
            return
        wait_for_last(PDL)
    if idle:
        return
    dim = tl.arange(0, BLOCK_DIM)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_DIM,), tl.float32)
    for start in range(0, splits, BLOCK_SPLITS):
        split = start + tl.arange(0, BLOCK_SPLITS)
        there = split < splits
        at = (first + split).to(tl.int64) * (ROWS * num_q_heads) + row_and_head
        lse = tl.load(lse_ptr + at, there, other=float("-inf"))
        parts = tl.load(part_ptr + at[:, None] * DIM + dim[None, :], there[:, None] & (dim < DIM)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - level)
        shrink = tl.exp2(top - level)
        acc = acc * shrink + tl.sum(parts * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    out = (acc / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token.to(tl.int64) * num_q_heads + row_and_head % num_q_heads) * DIM + dim, out, dim < DIM)


class SplitResults(NamedTuple):
    """Where ``max_splits`` splits, as many as a batch may have, leave their results: ``parts`` [max_splits, rows, H, D]
    float32, normalised, and ``lses`` [max_splits, rows, H] (base 2). Both are the output where none is merged."""

    parts: torch.Tensor
    lses: torch.Tensor
    max_splits: int


def split_results(plan: VerifyPlan, out: torch.Tensor) -> SplitResults:
    """Allocates the results of the splits of a batch with the output ``out`` [T, H, D]."""
    if not plan.splits.needs_merge:
        return SplitResults(out, out, len(plan.splits.split_indptr) - 1)
    shape = len(plan.splits.request_of_split), plan.rows, *out.shape[1:]
    return SplitResults(torch.empty(shape, dtype=torch.float32, device=out.device),
                        torch.empty(shape[:-1], dtype=torch.float32, device=out.device), shape[0])


def merge_rows(parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, qo_indptr: torch.Tensor, plan: VerifyPlan,
               inputs_ready: bool) -> None:
    """Merges ``parts`` [most splits, rows, H, D] float32, normalised, by ``lses`` [most splits, rows, H] (base 2) into
    ``out`` [T, H, D], for blocks that have several splits; all contiguous, on a GPU. ``inputs_ready``: the plan and
    ``qo_indptr`` were written before the last launch without PDL (kernels/_triton.py)."""
    heads, dim = out.shape[1:]
    block_dim = max(16, triton.next_power_of_2(dim))
    _merge_rows_kernel[(len(plan.length_indptr) - 1, plan.rows * heads)](
        parts, lses, out, qo_indptr, plan.splits.split_indptr, heads, ROWS=plan.rows,
        PER_REQUEST=plan.blocks_per_request, DIM=dim, BLOCK_DIM=block_dim, BLOCK_SPLITS=_SPLITS_AT_ONCE,
        INPUTS_READY=inputs_ready, num_warps=max(1, min(8, block_dim // 128)), **pdl(out))


def _span(window: int | None, rows: int, masked: bool) -> int | None:
    """The last tokens that a block of ``rows`` sees together; None: all."""
    return None if window is None else window + (_WORD_BITS if masked else rows) - 1


def plan_verify(qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int,
                num_kv_heads: int, num_sms: int, max_q_len: int, longest: int, tile: VerifyTile,
                splits: DecodeSplits | None = None, window: int | None = None, masked: bool = False) -> VerifyPlan:
    """Plans a batch whose requests have up to ``max_q_len`` rows and up to ``longest`` tokens, in this batch and in the
    replays of a graph that captures this. The arrays are those of ``verify_attention``; ``masked``: rows have words.
    The other arguments are those of ``plan_decode``."""
    requests = len(kv_last_page_len)
    rows = min(tile.rows, 1 << (max_q_len - 1).bit_length())  # few sizes, each of which is compiled
    per_request = -(-max_q_len // rows)
    blocks = requests * per_request
    length_indptr = torch.empty(blocks + 1, dtype=torch.int32, device=kv_indptr.device)
    if runs_triton(kv_indptr):
        _block_lengths_kernel[(1,)](qo_indptr, kv_indptr, kv_last_page_len, length_indptr, blocks, PAGE=page_size,
                                    ROWS=rows, PER_REQUEST=per_request, MASKED=masked,
                                    BLOCK=max(16, triton.next_power_of_2(blocks)))
    else:
        reference.block_lengths(qo_indptr, kv_indptr, kv_last_page_len, length_indptr, page_size, rows, per_request,
                                masked)
    plan = plan_decode(length_indptr, torch.ones_like(length_indptr[1:]), 1, num_kv_heads, num_sms, longest,
                       **(splits or DecodeSplits())._asdict(), window=_span(window, rows, masked))
    return VerifyPlan(rows, per_request, length_indptr, plan)


def verify_attention(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, qo_indptr: torch.Tensor,
                     kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor, scale: float,
                     plan: VerifyPlan, tile: VerifyTile, v_scale: float = 1.0, window: int | None = None,
                     sinks: torch.Tensor | None = None, mask: RowMask | None = None,
                     inputs_ready: bool = False, softcap: float = 0.0) -> torch.Tensor:
    """``softmax(q k^T * scale) v * v_scale``, where request b's rows are the last of its sequence: ``[T, Hq, D]``.

    The arguments are those of ``paged_prefill``, and a ``plan`` of the same batch, whose splits are no shorter than
    ``tile.tokens``. With ``mask`` rows see what that says, and a ``window`` hides no slot that has a bit. More pages
    may be listed than a request has tokens: ``kv_last_page_len`` is then zero or negative. ``inputs_ready``: plan, page
    table and ``qo_indptr`` were written before the last launch without PDL (kernels/_triton.py), so that they may be
    read while the previous kernel still runs; otherwise this is such a launch.
    """
    if not runs_triton(q):
        words, counts = (None, None) if mask is None else (mask.words, mask.counts)
        return reference.paged_attention(q, k_pages, v_pages, qo_indptr, kv_indptr, kv_indices, kv_last_page_len,
                                         scale, v_scale, window, sinks, words, counts, softcap)
    tokens, num_q_heads, dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group, splits = num_q_heads // num_kv_heads, plan.splits
    out = torch.empty((tokens, num_q_heads, dim), dtype=q.dtype, device=q.device)
    parts, lses, max_splits = split_results(plan, out)
    block_dim = max(16, triton.next_power_of_2(dim))
    options = pdl(q) if inputs_ready else {"PDL": False}
    _verify_attention_kernel[(num_kv_heads, max_splits)](
        q, k_pages, v_pages, sinks, *(mask or (None, None)), out, parts, lses, qo_indptr, kv_indptr, kv_indices,
        kv_last_page_len, plan.length_indptr, splits.request_of_split, splits.split_indptr,
        len(splits.split_indptr) - 1, scale * 1.4426950408889634, v_scale, q.stride(0), q.stride(1),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2), num_q_heads, PAGE=page_size, ROWS=plan.rows,
        PER_REQUEST=plan.blocks_per_request, GROUP=group,
        BLOCK_ROWS=max(16, triton.next_power_of_2(plan.rows * group)), DIM=dim, BLOCK_DIM=block_dim,
        BLOCK_TOKENS=tile.tokens, WINDOW=window or 0,
        SPAN=_span(window, plan.rows, mask is not None) or 0, SINKS=sinks is not None, CAP=softcap,
        MASKED=mask is not None, HALF=q.element_size() == 2 and k_pages.element_size() == 1,
        WORDS=reads_words(q, k_pages), AHEAD=tile.prefetched, INPUTS_READY=options["PDL"], num_warps=tile.warps,
        num_stages=tile.stages, **options)
    if splits.needs_merge:
        merge_rows(parts, lses, out, qo_indptr, plan, inputs_ready)
    return out


def verify_tile(q: torch.Tensor, k_pages: torch.Tensor, requests: int,
                max_q_len: int) -> tuple[VerifyTile, DecodeSplits]:
    """The policy's tile and splits for queries ``q`` [T, Hq, D] of ``requests`` with up to ``max_q_len`` rows each, and
    the pages [pages, Hkv, page_size, D] of a layer."""
    policy = policy_of(q.device).attention
    heads = k_pages.shape[1]
    facts = q.shape[2], q.element_size(), k_pages.element_size(), requests * heads
    return policy.verify(q.shape[1] // heads, max_q_len, *facts), policy.decode_splits(*facts)
