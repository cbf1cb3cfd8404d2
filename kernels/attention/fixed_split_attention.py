"""Attention whose rows have the same bits in a decode step, in a chunk of a prompt, or in a step that verifies drafts.

A row's keys are cut into splits that begin at multiples of their size, counted from the sequence's first token; the
size follows from the row's own position alone. Each split is a softmax of its own, tile by tile; their results are
added up one after the other by their log-sum-exps. Prompts do all of that in one program. Where rows are few, each
split is a program's, and a second kernel adds the results up by the same instructions. Tiles are the same for both, and
what a row does not see adds zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .. import reference
from .._triton import runs_triton, tl, triton
from ..tuning.policy import policy_of

MIN_SPLIT = 256
MAX_SPLITS = 16
"""Longer sequences, or windows, have splits of twice, four times, ... the tokens."""


@dataclass(frozen=True)
class FixedSplitPlan:
    """The rows of each program: block i begins at packed row ``row[i]`` (a token and a head of a KV head's group) of
    request ``request[i]`` and ends before ``stop[i]``, int32. ``splits``: programs that share a row's keys; 0: one
    program reads all."""

    request: torch.Tensor
    row: torch.Tensor
    stop: torch.Tensor
    splits: int


def plan_decode_rows(requests: int, group: int, block_rows: int, longest: int, window: int | None,
                     device: torch.device) -> FixedSplitPlan:
    """Plans a step of one token a request, of sequences up to ``longest`` tokens."""
    each = -(-group // block_rows)
    block = torch.arange(requests * each, dtype=torch.int32, device=device)
    row = block % each * block_rows
    splits = MAX_SPLITS if window else min(MAX_SPLITS, -(-longest // MIN_SPLIT))
    return FixedSplitPlan(block // each, row, (row + block_rows).clamp(max=group), splits)


def plan_verified_rows(qo_indptr: torch.Tensor, positions: torch.Tensor, max_q_len: int, group: int, block_rows: int,
                       longest: int, window: int | None) -> FixedSplitPlan:
    """Plans up to ``max_q_len`` rows a request, of sequences up to ``longest`` tokens, by ``qo_indptr`` [B + 1] and
    ``positions`` [T] on the device: a CUDA graph that holds this finds others in every replay. A request has blocks for
    the rows before and behind the place from which on splits are longer, many of which are empty. With a ``window`` a
    block is a token's: the windows of several would lie in more splits than those of one."""
    step, parts = (min(block_rows, group), 1) if window else (block_rows, 2)
    each = -(-max_q_len * group // step)
    count = qo_indptr.diff()
    block = torch.arange(len(count) * parts * each, dtype=torch.int32, device=qo_indptr.device)
    request, index = block // (parts * each), block % each
    end = (count * group)[request]
    begin = torch.zeros_like(end)
    if not window:
        edges = MIN_SPLIT * MAX_SPLITS * 2 ** torch.arange(len(_edges(longest)), device=count.device)
        first = positions[qo_indptr[:-1].clamp(max=len(positions) - 1).long()]
        edge = edges[torch.searchsorted(edges, first + 1).clamp(max=len(edges) - 1)]
        cut = (torch.minimum(edge - first, count) * group).to(torch.int32)[request]
        behind = block // each % parts == 1
        begin, end = torch.where(behind, cut, begin), torch.where(behind, end, cut)
    row = begin + index * step
    splits = MAX_SPLITS if window else min(MAX_SPLITS, -(-longest // MIN_SPLIT))
    return FixedSplitPlan(request, row, torch.minimum(row + step, end), splits)


def plan_rows(qo_indptr: np.ndarray, lengths: np.ndarray, group: int, block_rows: int, window: int | None,
              device: torch.device) -> FixedSplitPlan:
    """Plans requests of several rows, over page tables of ``lengths`` [B] tokens. Rows of one block have splits of one
    size; later, longer blocks start first."""
    blocks = []
    for request, (count, length) in enumerate(zip(np.diff(qo_indptr).tolist(), lengths.tolist())):
        first, edges = length - count, [] if window else _edges(length)
        cuts = [0, *((edge - first) * group for edge in edges if first < edge < length), count * group]
        for begin, end in zip(cuts[:-1], cuts[1:]):
            blocks += [(request, row, min(row + block_rows, end), first + row // group)
                       for row in range(begin, end, block_rows)]
    blocks.sort(key=lambda block: -block[3])
    table = torch.tensor([block[:3] for block in blocks], dtype=torch.int32).T.contiguous()
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return FixedSplitPlan(table[0], table[1], table[2], 0)


def _edges(length: int) -> list[int]:
    """Returns the positions below ``length``, and perhaps one after, from which on splits are longer."""
    edges = [MIN_SPLIT * MAX_SPLITS]
    while edges[-1] < length:
        edges.append(2 * edges[-1])
    return edges


@triton.jit
def _split_tokens(length, WINDOW: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Tokens of a split of a row that sees ``length`` tokens, or the last ``WINDOW`` of them, which lie in one split
    more than they fill."""
    tokens = length * 0 + MIN_SPLIT
    if WINDOW:
        while tokens * (MAX_SPLITS - 1) < WINDOW:
            tokens *= 2
    else:
        while tokens * MAX_SPLITS < length:
            tokens *= 2
    return tokens


@triton.jit
def _merge(out, weight, top, part, lse):
    """Adds a split's result ``part`` to those before. The products are fused explicitly: a compiler's choice might
    differ between two kernels."""
    new_top = tl.maximum(top, lse)
    level = tl.where(new_top == float("-inf"), 0.0, new_top)  # less its top, minus infinity would be NaN
    grow = tl.exp2(lse - level)
    shrink = tl.exp2(top - level)
    return tl.fma(part, grow[:, None], out * shrink[:, None]), tl.fma(weight, shrink, grow), new_top


@triton.jit
def _attend_split(q, begin, end, visible, offset, k_pages_ptr, v_pages_ptr, indices_ptr, stride_page, stride_slot,
                  scale_log2, PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr,
                  BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """``(result, log-sum-exp)`` of the positions ``[begin, end)``, of which row r sees those below ``visible[r]``; the
    page table begins with position ``offset``."""
    dim = tl.arange(0, BLOCK_DIM)
    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    for start in range(begin, end, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        present = (token < end) & (token >= offset)
        slot = tl.where(present, token - offset, 0)
        page = tl.load(indices_ptr + slot // PAGE, present, other=0).to(tl.int64)
        address = (page * stride_page + (slot % PAGE) * stride_slot)[:, None] + dim[None, :]
        inside = present[:, None] & (dim < DIM)[None, :]
        k = tl.load(k_pages_ptr + address, inside, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        seen = present[None, :] & (token[None, :] < visible[:, None])
        if WINDOW:
            seen = seen & (token[None, :] >= visible[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(top - level)
        v = tl.load(v_pages_ptr + address, inside, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = tl.fma(total, shrink, tl.sum(weights, 1))
        top = new_top
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    return acc / divisor[:, None], tl.where(some, top + tl.log2(divisor), float("-inf"))


@triton.jit
def _fixed_split_kernel(q_ptr, k_pages_ptr, v_pages_ptr, sinks_ptr, out_ptr, part_ptr, lse_ptr, block_request_ptr,
                        block_row_ptr, block_stop_ptr, positions_ptr, qo_indptr_ptr, kv_indptr_ptr, kv_indices_ptr,
                        last_page_len_ptr, scale_log2, v_scale, q_stride_t, q_stride_h, stride_page, stride_head,
                        stride_slot, num_q_heads, PAGE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
                        BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
                        WINDOW: tl.constexpr, SINKS: tl.constexpr, SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr,
                        MAX_SPLITS: tl.constexpr):
    block, kv_head = tl.program_id(0), tl.program_id(1)
    request = tl.load(block_request_ptr + block)
    first_row, stop_row = tl.load(block_row_ptr + block), tl.load(block_stop_ptr + block)
    if first_row >= stop_row:
        return
    first_token = tl.load(qo_indptr_ptr + request)
    end_token = tl.load(qo_indptr_ptr + request + 1)
    first_page = tl.load(kv_indptr_ptr + request)
    slots = (tl.load(kv_indptr_ptr + request + 1) - first_page - 1) * PAGE + tl.load(last_page_len_ptr + request)
    # The positions of void rows at the end of a chain may be clamped.
    before = tl.load(positions_ptr + first_token).to(tl.int32)  # tokens before the request's first row
    length = before + end_token - first_token

    row = first_row + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    in_block = row < stop_row
    token = tl.minimum(row, stop_row - 1) // GROUP  # rows after the last see what that one sees, and are not stored
    inside = in_block[:, None] & (dim < DIM)[None, :]
    head = kv_head * GROUP + row % GROUP
    query_row = (first_token + token).to(tl.int64)
    q = tl.load(q_ptr + (query_row * q_stride_t + head * q_stride_h)[:, None] + dim[None, :], inside, other=0.0)
    visible = before + token + 1
    seen_by_last = before + (stop_row - 1) // GROUP + 1
    tokens = _split_tokens(seen_by_last, WINDOW, MIN_SPLIT, MAX_SPLITS)
    first_seen = 0
    if WINDOW:
        first_seen = tl.maximum(before + first_row // GROUP + 1 - WINDOW, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    k_pages_ptr += kv_head * stride_head
    v_pages_ptr += kv_head * stride_head
    if SPLITS:
        split = first_seen // tokens + tl.program_id(2)
        if split * tokens >= seen_by_last:
            return
        part, lse = _attend_split(q, tl.maximum(split * tokens, first_seen),
                                  tl.minimum((split + 1) * tokens, seen_by_last), visible, length - slots, k_pages_ptr,
                                  v_pages_ptr, kv_indices_ptr + first_page, stride_page, stride_slot, scale_log2, PAGE,
                                  DIM, BLOCK_ROWS, BLOCK_DIM, BLOCK_TOKENS, WINDOW)
        at = (query_row * num_q_heads + head) * SPLITS + tl.program_id(2)
        tl.store(lse_ptr + at, lse, in_block)
        tl.store(part_ptr + at[:, None] * DIM + dim[None, :], part, inside)
    else:
        out = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
        weight = tl.zeros((BLOCK_ROWS,), tl.float32)
        top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        for split in range(first_seen // tokens, tl.cdiv(seen_by_last, tokens)):
            part, lse = _attend_split(q, tl.maximum(split * tokens, first_seen),
                                      tl.minimum((split + 1) * tokens, seen_by_last), visible, length - slots,
                                      k_pages_ptr, v_pages_ptr, kv_indices_ptr + first_page, stride_page, stride_slot,
                                      scale_log2, PAGE, DIM, BLOCK_ROWS, BLOCK_DIM, BLOCK_TOKENS, WINDOW)
            out, weight, top = _merge(out, weight, top, part, lse)
        if SINKS:  # as a key whose value is zero
            sink = tl.load(sinks_ptr + head) * 1.4426950408889634
            out, weight, top = _merge(out, weight, top, tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32), sink)
        result = (out / weight[:, None] * v_scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ((query_row * num_q_heads + head) * DIM)[:, None] + dim[None, :], result, inside)


@triton.jit
def _merge_fixed_splits_kernel(part_ptr, lse_ptr, sinks_ptr, out_ptr, positions_ptr, v_scale, num_q_heads,
                         DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
                         SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
                         BLOCK_TOKENS: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(positions_ptr + row).to(tl.int32) + 1
    tokens = _split_tokens(length, WINDOW, MIN_SPLIT, MAX_SPLITS)
    first_seen = 0
    if WINDOW:
        first_seen = tl.maximum(length - WINDOW, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    one, dim = tl.arange(0, 1), tl.arange(0, BLOCK_DIM)
    out = tl.zeros((1, BLOCK_DIM), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    top = tl.full((1,), float("-inf"), tl.float32)
    for split in range(tl.cdiv(length, tokens) - first_seen // tokens):
        at = (row * num_q_heads + head) * SPLITS + split
        part = tl.load(part_ptr + at * DIM + dim[None, :], (dim < DIM)[None, :], other=0.0)
        out, weight, top = _merge(out, weight, top, part, tl.load(lse_ptr + at + one))
    if SINKS:
        sink = tl.load(sinks_ptr + head + one) * 1.4426950408889634
        out, weight, top = _merge(out, weight, top, tl.zeros((1, BLOCK_DIM), tl.float32), sink)
    result = (out / weight[:, None] * v_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * num_q_heads + head) * DIM + dim[None, :], result, (dim < DIM)[None, :])


def fixed_split_attention(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, plan: FixedSplitPlan,
                          positions: torch.Tensor, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor,
                          kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor, scale: float, v_scale: float = 1.0,
                          window: int | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """``softmax(q k^T * scale) v * v_scale``, where request b's rows are the last of its sequence: ``[T, Hq, D]``.

    The arguments are those of ``paged_prefill``, with the rows' ``positions`` [T] int64; a page table may begin behind
    a sequence's first token, where a ``window`` hides what comes before.
    """
    if not runs_triton(q):
        return reference.paged_attention(q, k_pages, v_pages, qo_indptr, kv_indptr, kv_indices, kv_last_page_len,
                                         scale, v_scale, window, sinks)
    tokens, num_q_heads, dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    tile = policy_of(q.device).attention.fixed_split(dim, q.element_size())
    out = torch.empty((tokens, num_q_heads, dim), dtype=q.dtype, device=q.device)
    parts = lses = out
    if plan.splits:
        parts = torch.empty((tokens, num_q_heads, plan.splits, dim), dtype=torch.float32, device=q.device)
        lses = torch.empty((tokens, num_q_heads, plan.splits), dtype=torch.float32, device=q.device)
    common = {"DIM": dim, "BLOCK_DIM": max(16, triton.next_power_of_2(dim)), "BLOCK_TOKENS": tile.tokens,
              "WINDOW": window or 0, "SINKS": sinks is not None, "SPLITS": plan.splits, "MIN_SPLIT": MIN_SPLIT,
              "MAX_SPLITS": MAX_SPLITS}
    _fixed_split_kernel[(len(plan.request), num_kv_heads, max(1, plan.splits))](
        q, k_pages, v_pages, sinks, out, parts, lses, plan.request, plan.row, plan.stop, positions, qo_indptr,
        kv_indptr, kv_indices, kv_last_page_len, scale * 1.4426950408889634, v_scale, q.stride(0), q.stride(1),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2), num_q_heads, PAGE=page_size,
        GROUP=num_q_heads // num_kv_heads, BLOCK_ROWS=tile.rows, num_warps=tile.warps, num_stages=tile.stages,
        **common)
    if plan.splits:
        _merge_fixed_splits_kernel[(tokens, num_q_heads)](parts, lses, sinks, out, positions, v_scale, num_q_heads,
                                                    num_warps=1, **common)
    return out
