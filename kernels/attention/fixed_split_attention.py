"""Attention whose rows have the same bits in a decode step, in a chunk of a prompt, or in a step that verifies drafts.

A row's keys are cut into splits that begin at multiples of their size, counted from the sequence's first token; the
size follows from the row's own position alone. Each split is a softmax of its own, tile by tile; their results are
added up one after the other by their log-sum-exps. Prompts do all of that in one program. Where rows are few, programs
share the splits, and a second kernel adds the results up by the same instructions. Tiles have the same tokens for both,
and what a row does not see adds zeros.

Tiles of few rows and of many are computed by other instructions, with values in other threads. So nothing depends on
the order of threads: tensor cores add up 16 values at a time from the first to the last, and weights are added up as
integers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..device import num_sms
from ..tuning.attention import FixedSplitTile
from .paged_decode import prefetch_tiles
from .soft_cap import capped_share

MIN_SPLIT = 128
MAX_SPLITS = 16
"""Longer sequences, or windows, have splits of twice, four times, ... the tokens."""
MOST_TOKENS_OF_PROGRAM = 1 << 14
MOST_LEAST_PROGRAMS = 4
"""Where a sequence may be longer, several programs share its splits even in large batches: they are mixed then."""


@dataclass(frozen=True)
class FixedSplitPlan:
    """The rows of each program: block i begins at packed row ``row[i]`` (a token and a head of a KV head's group) of
    request ``request[i]`` and ends before ``stop[i]``, int32; ``tile`` has as many rows as the largest. ``splits``: the
    most that a row's keys have, which ``least_programs`` or more share; 0: one program reads all."""

    request: torch.Tensor
    row: torch.Tensor
    stop: torch.Tensor
    splits: int
    tile: FixedSplitTile
    least_programs: int = 1

    def programs(self, heads: int, num_sms: int) -> int:
        """Returns how many programs share the splits of a block and one of ``heads`` KV heads."""
        each = self.tile.programs_per_sm * num_sms // max(1, len(self.request) * heads)
        return max(1, min(self.splits, max(each, self.least_programs)))


def plan_decode_rows(requests: int, group: int, tile: FixedSplitTile, longest: int, window: int | None,
                     device: torch.device) -> FixedSplitPlan:
    """Plans a step of one token a request, of sequences up to ``longest`` tokens."""
    each = -(-group // tile.rows)
    block = torch.arange(requests * each, dtype=torch.int32, device=device)
    row = block % each * tile.rows
    return FixedSplitPlan(block // each, row, (row + tile.rows).clamp(max=group), *_shares(longest, window, tile))


def plan_verified_rows(qo_indptr: torch.Tensor, positions: torch.Tensor, max_q_len: int, group: int,
                       tile: FixedSplitTile, longest: int, window: int | None) -> FixedSplitPlan:
    """Plans up to ``max_q_len`` rows a request, of sequences up to ``longest`` tokens, by ``qo_indptr`` [B + 1] and
    ``positions`` [T] on the device: a CUDA graph that holds this finds others in every replay. A request has blocks for
    the rows before and behind the place from which on splits are longer, many of which are empty. With a ``window`` a
    block is a token's: the windows of several would lie in more splits than those of one."""
    step, parts = (min(tile.rows, group), 1) if window else (tile.rows, 2)
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
    return FixedSplitPlan(request, row, torch.minimum(row + step, end), *_shares(longest, window, tile))


def _shares(longest: int, window: int | None, tile: FixedSplitTile) -> tuple[int, FixedSplitTile, int]:
    """Returns the most splits of sequences up to ``longest`` tokens, of few sizes, each of which is compiled; the tile,
    and the least programs."""
    if window:
        return MAX_SPLITS, tile, 1
    splits = min(MAX_SPLITS, 1 << (-(-longest // MIN_SPLIT) - 1).bit_length())
    return splits, tile, min(MOST_LEAST_PROGRAMS, -(-longest // MOST_TOKENS_OF_PROGRAM))


def plan_rows(qo_indptr: np.ndarray, lengths: np.ndarray, group: int, tile: FixedSplitTile, window: int | None,
              device: torch.device) -> FixedSplitPlan:
    """Plans requests of several rows, over page tables of ``lengths`` [B] tokens. Rows of one block have splits of one
    size; later, longer blocks start first."""
    blocks = []
    for request, (count, length) in enumerate(zip(np.diff(qo_indptr).tolist(), lengths.tolist())):
        first, edges = length - count, [] if window else _edges(length)
        cuts = [0, *((edge - first) * group for edge in edges if first < edge < length), count * group]
        for begin, end in zip(cuts[:-1], cuts[1:]):
            blocks += [(request, row, min(row + tile.rows, end), first + row // group)
                       for row in range(begin, end, tile.rows)]
    blocks.sort(key=lambda block: -block[3])
    table = torch.tensor([block[:3] for block in blocks], dtype=torch.int32).T.contiguous()
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return FixedSplitPlan(table[0], table[1], table[2], 0, tile)


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
def _sum_in_any_order(weights):
    """Sums ``weights`` [R, T], of 0 to 1, up over their tokens as integers: one plus a weight has these in its bits."""
    counts = (weights + 1.0).to(tl.int32, bitcast=True) - 0x3F800000
    return tl.sum(counts, 1).to(tl.float32) * 1.1920928955078125e-07


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
def _split_result(acc, total, top, scale_log2):
    """``(result, log-sum-exp)`` of a split, whose greatest product is ``top``."""
    some = total > 0.0
    divisor = tl.where(some, total, 1.0)
    lse = tl.fma(tl.where(some, top, 0.0), scale_log2, tl.log2(divisor))
    return acc / divisor[:, None], tl.where(some, lse, float("-inf"))


@triton.jit
def _attend(q, begin, end, split_tokens, visible, offset, page, k_pages_ptr, v_pages_ptr, indices_ptr, stride_page,
            stride_slot, scale_log2, part_ptr, lse_ptr, at, inside, MERGES: tl.constexpr, PAGE: tl.constexpr,
            DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
            WINDOW: tl.constexpr, CAP: tl.constexpr):
    """Attend to the positions ``[begin, end)``, of which row r sees those below ``visible[r]``. The page table begins
    with position ``offset``, and ``page`` has the pages of the first tile. Splits end at multiples of ``split_tokens``.
    Returns ``(sum of their results, of their weights, top)`` with MERGES; else each split's result is stored, that of
    row r's first from ``at[r]`` on."""
    dim = tl.arange(0, BLOCK_DIM)
    factor = scale_log2
    if CAP > 0.0:
        factor = CAP * 1.4426950408889634
    first = visible - WINDOW
    visible = tl.minimum(visible, end)
    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    if MERGES:
        out, weight, most = acc, total, top
    for start in range(begin, end, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        present, slot = _slots_of(token, end, offset, WINDOW)
        address = (page.to(tl.int64) * stride_page + (slot % PAGE) * stride_slot)[:, None] + dim[None, :]
        loaded = present[:, None] & (dim < DIM)[None, :]
        # The next iteration's: loads of keys that wait for page ids in their own iteration are never pipelined.
        page = _pages_of(start + BLOCK_TOKENS, end, offset, indices_ptr, PAGE, BLOCK_TOKENS, WINDOW)
        k = tl.load(k_pages_ptr + address, loaded, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if CAP > 0.0:
            scores = capped_share(scores * scale_log2, CAP)
        seen = token[None, :] < visible[:, None]
        if WINDOW:
            seen = seen & (token[None, :] >= first[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        # Scaled last: a product before the difference might be fused with it, or not.
        weights = tl.exp2((scores - level[:, None]) * factor)
        shrink = tl.exp2((top - level) * factor)
        v = tl.load(v_pages_ptr + address, loaded, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        total = tl.fma(total, shrink, _sum_in_any_order(weights))
        top = new_top
        next_start = start + BLOCK_TOKENS
        if (next_start % split_tokens == 0) | (next_start >= end):
            part, lse = _split_result(acc, total, top, factor)
            if MERGES:
                out, weight, most = _merge(out, weight, most, part, lse)
            else:
                tl.store(lse_ptr + at, lse, tl.max(inside.to(tl.int32), 1) > 0)
                tl.store(part_ptr + at[:, None] * DIM + dim[None, :], part, inside)
                at += 1
            top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_ROWS,), tl.float32)
            acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    found = (acc, total, top)
    if MERGES:
        found = (out, weight, most)
    return found


@triton.jit
def _slots_of(token, end, offset, WINDOW: tl.constexpr):
    """``(tokens that are there, their places in the page table)`` below ``end``. A table without window is whole."""
    present, slot = token < end, token
    if WINDOW:
        present = present & (token >= offset)
        slot = tl.where(present, token - offset, 0)
    return present, slot


@triton.jit
def _pages_of(start, end, offset, indices_ptr, PAGE: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """The pages of a tile that begins with position ``start``."""
    present, slot = _slots_of(start + tl.arange(0, BLOCK_TOKENS), end, offset, WINDOW)
    return tl.load(indices_ptr + slot // PAGE, present, other=0, cache_modifier=".cg")


@triton.jit
def _fixed_split_kernel(q_ptr, k_pages_ptr, v_pages_ptr, sinks_ptr, out_ptr, part_ptr, lse_ptr, block_request_ptr,
                        block_row_ptr, block_stop_ptr, positions_ptr, qo_indptr_ptr, kv_indptr_ptr, kv_indices_ptr,
                        last_page_len_ptr, scale_log2, v_scale, q_stride_t, q_stride_h, stride_page, stride_head,
                        stride_slot, num_q_heads, PAGE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
                        BLOCK_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
                        WINDOW: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr, SPLITS: tl.constexpr,
                        MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, AHEAD: tl.constexpr,
                        INPUTS_READY: tl.constexpr, PDL: tl.constexpr):
    block, kv_head = tl.program_id(0), tl.program_id(1)
    start_next(PDL)
    if not INPUTS_READY:
        wait_for_last(PDL)
    request = tl.load(block_request_ptr + block, cache_modifier=".cg")
    first_row = tl.load(block_row_ptr + block, cache_modifier=".cg")
    stop_row = tl.load(block_stop_ptr + block, cache_modifier=".cg")
    if first_row >= stop_row:  # if INPUTS_READY without a wait: blocks that have rows do
        return
    first_token = tl.load(qo_indptr_ptr + request, cache_modifier=".cg")
    end_token = tl.load(qo_indptr_ptr + request + 1, cache_modifier=".cg")
    first_page = tl.load(kv_indptr_ptr + request, cache_modifier=".cg")
    pages = tl.load(kv_indptr_ptr + request + 1, cache_modifier=".cg") - first_page
    slots = (pages - 1) * PAGE + tl.load(last_page_len_ptr + request, cache_modifier=".cg")
    # The positions of void rows at the end of a chain may be clamped.
    before = tl.load(positions_ptr + first_token, cache_modifier=".cg").to(tl.int32)  # tokens before the first row
    offset = 0
    if WINDOW:
        offset = before + end_token - first_token - slots

    row = first_row + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    in_block = row < stop_row
    token = tl.minimum(row, stop_row - 1) // GROUP  # rows after the last see what that one sees, and are not stored
    inside = in_block[:, None] & (dim < DIM)[None, :]
    head = kv_head * GROUP + row % GROUP
    query_row = (first_token + token).to(tl.int64)
    visible = before + token + 1
    seen_by_last = before + (stop_row - 1) // GROUP + 1
    tokens = _split_tokens(seen_by_last, WINDOW, MIN_SPLIT, MAX_SPLITS)
    first_seen = 0
    if WINDOW:
        first_seen = tl.maximum(before + first_row // GROUP + 1 - WINDOW, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    k_pages_ptr += kv_head * stride_head
    v_pages_ptr += kv_head * stride_head
    kv_indices_ptr += first_page
    # A program's splits are neighbours.
    first_split, programs = first_seen // tokens, tl.num_programs(2)
    splits = tl.cdiv(seen_by_last, tokens) - first_split
    before_own = splits * tl.program_id(2) // programs
    begin = tl.maximum((first_split + before_own) * tokens, first_seen)
    end = tl.minimum((first_split + splits * (tl.program_id(2) + 1) // programs) * tokens, seen_by_last)
    if begin >= end:  # nor do these wait: each block's last does
        return
    page = _pages_of(begin, end, offset, kv_indices_ptr, PAGE, BLOCK_TOKENS, WINDOW)
    if INPUTS_READY:
        prefetch_tiles(k_pages_ptr, v_pages_ptr, kv_indices_ptr, tl.maximum(begin - offset, 0), end - offset, 0,
                       stride_page, stride_slot, PAGE, DIM, BLOCK_TOKENS, AHEAD)
        wait_for_last(PDL)
    q = tl.load(q_ptr + (query_row * q_stride_t + head * q_stride_h)[:, None] + dim[None, :], inside, other=0.0)
    out, weight, top = _attend(q, begin, end, tokens, visible, offset, page, k_pages_ptr, v_pages_ptr, kv_indices_ptr,
                               stride_page, stride_slot, scale_log2, part_ptr, lse_ptr,
                               (query_row * num_q_heads + head) * SPLITS + before_own, inside, SPLITS == 0, PAGE, DIM,
                               BLOCK_ROWS, BLOCK_DIM, BLOCK_TOKENS, WINDOW, CAP)
    if not SPLITS:
        if SINKS:  # as a key whose value is zero
            sink = tl.load(sinks_ptr + head) * 1.4426950408889634
            out, weight, top = _merge(out, weight, top, tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32), sink)
        result = (out / weight[:, None] * v_scale).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + ((query_row * num_q_heads + head) * DIM)[:, None] + dim[None, :], result, inside)


@triton.jit
def _merge_fixed_splits_kernel(part_ptr, lse_ptr, sinks_ptr, out_ptr, positions_ptr, v_scale, num_q_heads,
                               DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr,
                               SPLITS: tl.constexpr, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
                               BLOCK_TOKENS: tl.constexpr, INPUTS_READY: tl.constexpr, PDL: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start_next(PDL)
    if not INPUTS_READY:
        wait_for_last(PDL)
    length = tl.load(positions_ptr + row, cache_modifier=".cg").to(tl.int32) + 1
    tokens = _split_tokens(length, WINDOW, MIN_SPLIT, MAX_SPLITS)
    first_seen = 0
    if WINDOW:
        first_seen = tl.maximum(length - WINDOW, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    splits = tl.cdiv(length, tokens) - first_seen // tokens
    if INPUTS_READY:
        wait_for_last(PDL)
    one, dim = tl.arange(0, 1), tl.arange(0, BLOCK_DIM)
    out = tl.zeros((1, BLOCK_DIM), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    top = tl.full((1,), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):  # all loads are in flight at once; what is not there changes nothing
        at = (row * num_q_heads + head) * SPLITS + split
        part = tl.load(part_ptr + at * DIM + dim[None, :], (split < splits) & (dim < DIM)[None, :], other=0.0)
        lse = tl.load(lse_ptr + at + one, (one == 0) & (split < splits), other=float("-inf"))
        out, weight, top = _merge(out, weight, top, part, lse)
    if SINKS:
        sink = tl.load(sinks_ptr + head + one) * 1.4426950408889634
        out, weight, top = _merge(out, weight, top, tl.zeros((1, BLOCK_DIM), tl.float32), sink)
    result = (out / weight[:, None] * v_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * num_q_heads + head) * DIM + dim[None, :], result, (dim < DIM)[None, :])


def fixed_split_attention(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, plan: FixedSplitPlan,
                          positions: torch.Tensor, qo_indptr: torch.Tensor, kv_indptr: torch.Tensor,
                          kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor, scale: float, v_scale: float = 1.0,
                          window: int | None = None, sinks: torch.Tensor | None = None,
                          inputs_ready: bool = False, softcap: float = 0.0) -> torch.Tensor:
    """``softmax(q k^T * scale) v * v_scale``, where request b's rows are the last of its sequence: ``[T, Hq, D]``.

    The arguments are those of ``paged_prefill``, with the rows' ``positions`` [T] int64; a page table may begin behind
    a sequence's first token, where a ``window`` hides what comes before. ``inputs_ready``: plan, positions, page table
    and ``qo_indptr`` were written before the last launch without PDL (kernels/_triton.py), so that they may be read
    while the previous kernel still runs; otherwise this is such a launch.
    """
    if not runs_triton(q):
        return reference.paged_attention(q, k_pages, v_pages, qo_indptr, kv_indptr, kv_indices, kv_last_page_len,
                                         scale, v_scale, window, sinks, softcap=softcap)
    tokens, num_q_heads, dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    tile, programs = plan.tile, plan.programs(num_kv_heads, num_sms(q.device))
    splits = plan.splits if programs > 1 else 0
    out = torch.empty((tokens, num_q_heads, dim), dtype=q.dtype, device=q.device)
    parts = lses = out
    if splits:
        parts = torch.empty((tokens, num_q_heads, splits, dim), dtype=torch.float32, device=q.device)
        lses = torch.empty((tokens, num_q_heads, splits), dtype=torch.float32, device=q.device)
    options = pdl(q) if inputs_ready else {"PDL": False}
    common = {"DIM": dim, "BLOCK_DIM": max(16, triton.next_power_of_2(dim)), "BLOCK_TOKENS": tile.tokens,
              "WINDOW": window or 0, "SINKS": sinks is not None, "SPLITS": splits, "MIN_SPLIT": MIN_SPLIT,
              "MAX_SPLITS": MAX_SPLITS, "INPUTS_READY": options["PDL"]}
    _fixed_split_kernel[(len(plan.request), num_kv_heads, programs)](
        q, k_pages, v_pages, sinks, out, parts, lses, plan.request, plan.row, plan.stop, positions, qo_indptr,
        kv_indptr, kv_indices, kv_last_page_len, scale * 1.4426950408889634, v_scale, q.stride(0), q.stride(1),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2), num_q_heads, PAGE=page_size,
        GROUP=num_q_heads // num_kv_heads, BLOCK_ROWS=tile.rows, CAP=softcap, AHEAD=tile.prefetched,
        num_warps=tile.warps, num_stages=tile.stages, **common, **options)
    if splits:
        _merge_fixed_splits_kernel[(tokens, num_q_heads)](
            parts, lses, sinks, out, positions, v_scale, num_q_heads, num_warps=1, **common, **pdl(q))
    return out
