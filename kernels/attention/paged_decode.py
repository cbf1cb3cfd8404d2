"""Attention of one query row a request over its pages, split along the sequence.

A decode step has few programs (requests x KV heads) with long loops: cutting the keys into splits of about equal length
fills the GPU whatever the lengths, and a second, small kernel merges a request's splits by their log-sum-exps
(Flash-Decoding, Dao et al., 2023). A request of one split needs no merge: the first kernel writes its result. (A merge
by the program that ends last, with a counter, took 5 us of one request's 2,048 tokens on an H200.)

All query heads of a KV head are rows of one tile, padded to the 16 that a matrix product takes: keys are read once.
Float8 keys are multiplied in float16, which represents each of them; queries, and weights of 1 at most, fit it as well.
On a Hopper GPU decode_warp_specialized.py computes heads of 128 of many requests over 16-bit pages, and
decode_float8_warp_specialized.py over pages in e4m3.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..tuning.attention import DecodeTile
from ..tuning.policy import policy_of
from .current_kv import CurrentKV, rope_angles, rope_applied
from .decode_plan import DecodePlan, split_range
from .float8_words import load_quarters, merge_quarters, reads_words
from .merge_splits import merge_splits
from .soft_cap import soft_cap


# Without ``do_not_specialize`` a batch of the first size that is a multiple of 16 would recompile: a second's pause for
# every running request.
@triton.jit(do_not_specialize=["requests"])
def _paged_decode_kernel(q_ptr, k_pages_ptr, v_pages_ptr, sinks_ptr, out_ptr, part_ptr, lse_ptr, kv_indptr_ptr,
                         kv_indices_ptr, last_page_len_ptr, request_of_split_ptr, split_indptr_ptr, requests,
                         scale_log2, v_scale, q_stride_t, q_stride_h, stride_page, stride_head, stride_slot,
                         num_q_heads, k_ptr, v_ptr, k_stride_t, k_stride_h, cos_sin_ptr, position_ptr, q_weight_ptr,
                         k_weight_ptr, eps, CURRENT_KV: tl.constexpr, WAITS_LATE: tl.constexpr, NORM: tl.constexpr,
                         PAGE: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, DIM: tl.constexpr,
                         BLOCK_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, AHEAD: tl.constexpr,
                         INPUTS_READY: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, CAP: tl.constexpr,
                         HALF: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    start_next(PDL)
    if not INPUTS_READY:
        wait_for_last(PDL)
    # If INPUTS_READY these do not wait: split 0, which always exists, does.
    if split >= tl.load(split_indptr_ptr + requests, cache_modifier=".cg"):
        return
    request, splits, first_page, begin, end = split_range(split, request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr,
                                                          last_page_len_ptr, PAGE, BLOCK_TOKENS, WINDOW)
    dim = tl.arange(0, BLOCK_DIM)
    offset = tl.arange(0, BLOCK_TOKENS)
    stop = end
    if CURRENT_KV:
        last = split == tl.load(split_indptr_ptr + request, cache_modifier=".cg") + splits - 1
        stop = tl.where(last, end - 1, end)
        current_at = tl.load(kv_indices_ptr + first_page + (end - 1) // PAGE, cache_modifier=".cg").to(tl.int64)
        current_at = current_at * stride_page + kv_head * stride_head + ((end - 1) % PAGE) * stride_slot
        cos, sin = rope_angles(cos_sin_ptr, tl.load(position_ptr + request, cache_modifier=".cg"), DIM, BLOCK_DIM)
        k_ptr += request * k_stride_t + kv_head * k_stride_h
        v_ptr += request * k_stride_t + kv_head * k_stride_h
    page = tl.load(kv_indices_ptr + first_page + (begin + offset) // PAGE, begin + offset < stop, other=0,
                   cache_modifier=".cg")
    if INPUTS_READY:
        prefetch_tiles(k_pages_ptr, v_pages_ptr, kv_indices_ptr + first_page, begin, end, kv_head * stride_head,
                       stride_page,
               stride_slot, PAGE, DIM, BLOCK_TOKENS, AHEAD)
        if not WAITS_LATE:
            wait_for_last(PDL)

    group = tl.arange(0, BLOCK_GROUP)
    heads = kv_head * GROUP + group
    in_group = group < GROUP
    in_dim = dim < DIM
    q_ptr += request * q_stride_t
    if CURRENT_KV:
        q = tl.zeros((BLOCK_GROUP, BLOCK_DIM), q_ptr.dtype.element_ty)
    else:
        q = tl.load(q_ptr + heads[:, None] * q_stride_h + dim[None, :], in_group[:, None] & in_dim[None, :], other=0.0)
    if HALF:
        q = q.to(tl.float16)
    top = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_GROUP,), tl.float32)
    PARTS: tl.constexpr = 4 if WORDS else 1
    acc = tl.zeros((BLOCK_GROUP, BLOCK_DIM // PARTS), tl.float32)
    # The values of words stay separate: value i of each word is summed up in the i-th.
    acc_1, acc_2, acc_3 = acc, acc, acc
    if SINKS:  # as a key whose value is zero, of the request's first split
        sink = tl.load(sinks_ptr + heads, in_group, other=0.0) * 1.4426950408889634
        first = split == tl.load(split_indptr_ptr + request, cache_modifier=".cg")
        top = tl.where(first, sink, top)
        total = tl.where(first, 1.0, total)
    if CURRENT_KV and not WAITS_LATE:
        q, top, total, acc = _add_current_kv(q_ptr, k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, heads, in_group, cos, sin,
                                             last, current_at, q_stride_h, scale_log2, q_weight_ptr, k_weight_ptr, eps,
                                             top, total, acc, NORM, DIM, BLOCK_DIM, CAP)
    for start in range(begin, tl.maximum(stop, begin + 1) if WAITS_LATE else stop, BLOCK_TOKENS):
        if WAITS_LATE:  # noqa: SIM102 (one is known to the compiler)
            if start == begin:  # the first tiles' keys and values, which are all in pages, are in flight by now
                wait_for_last(PDL)
                q, top, total, acc = _add_current_kv(q_ptr, k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, heads, in_group,
                                                     cos, sin, last, current_at, q_stride_h, scale_log2, q_weight_ptr,
                                                     k_weight_ptr, eps, top, total, acc, NORM, DIM, BLOCK_DIM, CAP)
        token = start + offset
        present = token < stop
        slot = page.to(tl.int64) * stride_page + kv_head * stride_head + (token % PAGE) * stride_slot
        address = slot[:, None] + dim[None, :]
        inside = present[:, None] & in_dim[None, :]
        # The next iteration's: loads of keys that wait for page ids in their own iteration are never pipelined.
        page = tl.load(kv_indices_ptr + first_page + (token + BLOCK_TOKENS) // PAGE, token + BLOCK_TOKENS < stop,
                       other=0)
        k = tl.load(k_pages_ptr + address, inside, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if CAP > 0.0:
            scores = soft_cap(scores, CAP)
        scores = tl.where(present[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
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
    # A split has at least one token: as many splits as tiles at most, for no split is shorter than a tile on average.
    if WORDS:
        acc = merge_quarters(acc, acc_1, acc_2, acc_3)
    result = acc / total[:, None] * v_scale
    stored = in_group[:, None] & in_dim[None, :]
    out = out_ptr + request * num_q_heads * DIM
    if splits == 1:
        tl.store(out + heads[:, None] * DIM + dim[None, :], result.to(out_ptr.dtype.element_ty), stored)
    else:
        row = split.to(tl.int64) * num_q_heads + heads
        tl.store(lse_ptr + row, top + tl.log2(total), in_group)
        tl.store(part_ptr + row[:, None] * DIM + dim[None, :], result, stored)


@triton.jit
def _add_current_kv(q_ptr, k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, heads, in_group, cos, sin, last, current_at,
                    q_stride_h, scale_log2, q_weight_ptr, k_weight_ptr, eps, top, total, acc, NORM: tl.constexpr,
                    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, CAP: tl.constexpr):
    """``(q with rope applied, top, total, acc)`` that include the request's current key and value, where this is its
    ``last`` split: they are also stored at ``current_at`` of the pages."""
    q = rope_applied(q_ptr + heads * q_stride_h, in_group, q_weight_ptr, eps, cos, sin, NORM, DIM, BLOCK_DIM)
    dim = tl.arange(0, BLOCK_DIM)[None, :]
    one = tl.arange(0, 1)
    k = rope_applied(k_ptr + one, (one == 0) & last, k_weight_ptr, eps, cos, sin, NORM, DIM, BLOCK_DIM)
    v = tl.load(v_ptr + dim, (dim < DIM) & last, other=0.0)
    tl.store(k_pages_ptr + current_at + dim, k.to(k_pages_ptr.dtype.element_ty), (dim < DIM) & last)
    tl.store(v_pages_ptr + current_at + dim, v.to(v_pages_ptr.dtype.element_ty), (dim < DIM) & last)
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale_log2
    if CAP > 0.0:
        score = soft_cap(score, CAP)
    new_top = tl.maximum(top, score)
    total = tl.where(last, total * tl.exp2(top - new_top) + tl.exp2(score - new_top), total)
    acc = tl.where(last, tl.exp2(score - new_top)[:, None] * v.to(tl.float32), acc)
    return q, tl.where(last, new_top, top), total, acc


@triton.jit
def prefetch_tiles(k_pages_ptr, v_pages_ptr, indices_ptr, begin, end, head, stride_page, stride_slot,
                   PAGE: tl.constexpr,
              DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, AHEAD: tl.constexpr):
    """Prefetch the first AHEAD tiles of a split into the L2 cache, which sees rows that are written meanwhile."""
    LINE: tl.constexpr = 128 * 8 // k_pages_ptr.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (DIM + LINE - 1) // LINE
    line = tl.arange(0, triton.next_power_of_2(LINES))
    for start in range(begin, tl.minimum(begin + AHEAD * BLOCK_TOKENS, end), BLOCK_TOKENS):
        # Threads without a token of their own prefetch one that another thread prefetches too.
        token = tl.minimum(start + tl.arange(0, BLOCK_TOKENS), end - 1)
        page = tl.load(indices_ptr + token // PAGE, cache_modifier=".cg").to(tl.int64)
        row = page * stride_page + head + (token % PAGE) * stride_slot
        address = row[:, None] + tl.minimum(line * LINE, DIM - 1)[None, :]
        _prefetch_lines(k_pages_ptr + address)
        _prefetch_lines(v_pages_ptr + address)


@triton.jit
def _prefetch_lines(pointers):
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
                              dtype=tl.int32, is_pure=False, pack=1)


def supports_warp_specialized(q: torch.Tensor, k_pages: torch.Tensor) -> bool:
    """Says whether one of the warp-specialized kernels takes these arguments of ``paged_decode``, and is faster where
    there are no windows, sinks or current rows. Over float8 pages a query keeps the 8 bits of a bfloat16 alone."""
    heads, page_size, dim = k_pages.shape[1:]
    taken = (q.dtype,) if q.dtype == torch.float16 else (q.dtype, torch.float8_e4m3fn)
    return (q.is_cuda and q.element_size() == 2 and k_pages.dtype in taken and dim == 128 and k_pages.stride(2) == dim
            and page_size in (16, 32, 64, 128) and q.shape[1] <= 16 * heads
            and policy_of(q.device).attention.decode_warp_specialized(len(q) * heads))


def paged_decode(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, kv_indptr: torch.Tensor,
                 kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor, scale: float, plan: DecodePlan,
                 tile: DecodeTile | None = None, v_scale: float = 1.0, inputs_ready: bool = False,
                 window: int | None = None, sinks: torch.Tensor | None = None,
                 current_kv: CurrentKV | None = None, softcap: float = 0.0) -> torch.Tensor:
    """``softmax(q k^T * scale) v * v_scale`` of each request over all its tokens: ``[B, Hq, D]``.

    ``q`` [B, Hq, D], contiguous in D; ``k_pages`` and ``v_pages`` one layer of the pool with equal strides
    [pages, Hkv, page_size, D]; the page table in FlashInfer's form (int32). Query heads
    ``[h * Hq / Hkv, (h + 1) * Hq / Hkv)`` share KV head h. Pages may be of another type than ``q``. ``plan`` is of
    the same page table, and its splits are no shorter than ``tile.tokens``: without ``tile``, those of the policy's
    ``decode_splits``. ``inputs_ready``: plan, page table and the pages' tokens but the last of each request were
    written before the last launch without PDL (kernels/_triton.py), so that they may be read while the previous kernel
    still runs; otherwise this is such a launch. ``current_kv`` has each request's last token, which is not in its page
    yet: it is stored there, and rope is applied to it and to ``q``. Pages are then of the type of ``q``. More pages may
    be listed than a request has tokens: ``kv_last_page_len`` is then zero or negative. A ``softcap`` c makes scores
    ``c * tanh(scores / c)``.
    """
    assert current_kv is None or (k_pages.dtype == q.dtype and current_kv.k.stride() == current_kv.v.stride())
    if not runs_triton(q):
        if current_kv is not None:
            page_size = k_pages.shape[2]
            newest = (kv_indptr.diff() - 1).long() * page_size + kv_last_page_len - 1
            reference.rope_and_store(q, current_kv.k, current_kv.v, k_pages, v_pages,
                                     kv_indices[kv_indptr[:-1] + newest // page_size].long(), newest % page_size,
                                     current_kv.cos_sin, current_kv.positions, 1.0, 1.0, current_kv.norms)
        rows = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        return reference.paged_attention(q, k_pages, v_pages, rows, kv_indptr, kv_indices, kv_last_page_len, scale,
                                         v_scale, window, sinks, softcap=softcap)
    requests, num_q_heads, dim = q.shape
    out = torch.empty((requests, num_q_heads, dim), dtype=q.dtype, device=q.device)
    parts = lses = out
    max_splits = requests
    if plan.needs_merge:
        max_splits = len(plan.request_of_split)
        parts = torch.empty((max_splits, num_q_heads, dim), dtype=torch.float32, device=q.device)
        lses = torch.empty((max_splits, num_q_heads), dtype=torch.float32, device=q.device)
    outs = (out, parts, lses)
    plain = tile is None and window is None and sinks is None and current_kv is None and not softcap
    if plain and supports_warp_specialized(q, k_pages):
        _launch_warp_specialized(q, k_pages, v_pages, (kv_indptr, kv_indices, kv_last_page_len), scale, plan, v_scale,
                                 inputs_ready, outs)
    else:
        tile = tile or policy_of(q.device).attention.decode(dim, q.element_size(), k_pages.element_size(),
                                                            requests * k_pages.shape[1])
        _launch(q, k_pages, v_pages, (kv_indptr, kv_indices, kv_last_page_len), scale, plan, tile, v_scale,
                inputs_ready, window, sinks, current_kv, softcap, outs)
    if plan.needs_merge:
        merge_splits(parts, lses, out, plan, inputs_ready)
    return out


def _launch_warp_specialized(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
                             table: tuple[torch.Tensor, torch.Tensor, torch.Tensor], scale: float, plan: DecodePlan,
                             v_scale: float, inputs_ready: bool,
                             outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    # Gluon is not there without Triton.
    from .decode_float8_warp_specialized import decode_float8_warp_specialized
    from .decode_warp_specialized import decode_warp_specialized
    launch = decode_warp_specialized if k_pages.dtype == q.dtype else decode_float8_warp_specialized
    launch(q, k_pages, v_pages, *table, scale, plan, v_scale, inputs_ready, outs)


def _launch(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
            table: tuple[torch.Tensor, torch.Tensor, torch.Tensor], scale: float, plan: DecodePlan, tile: DecodeTile,
            v_scale: float, inputs_ready: bool, window: int | None, sinks: torch.Tensor | None,
            current_kv: CurrentKV | None, softcap: float,
            outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    requests, num_q_heads, dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group = num_q_heads // num_kv_heads
    options = pdl(q) if inputs_ready else {"PDL": False}
    k, v, cos_sin, positions, norms = current_kv or CurrentKV(q, q, q, q)
    _paged_decode_kernel[(num_kv_heads, len(plan.request_of_split) if plan.needs_merge else requests)](
        q, k_pages, v_pages, sinks, *outs, *table, plan.request_of_split, plan.split_indptr, requests,
        scale * 1.4426950408889634, v_scale, q.stride(0), q.stride(1), k_pages.stride(0), k_pages.stride(1),
        k_pages.stride(2), num_q_heads, k, v, k.stride(0), k.stride(1), cos_sin, positions,
        norms.q_weight if norms else q, norms.k_weight if norms else q, norms.eps if norms else 0.0,
        CURRENT_KV=current_kv is not None, WAITS_LATE=current_kv is not None and tile.waits_late and inputs_ready,
        NORM=norms is not None, PAGE=page_size, GROUP=group, BLOCK_GROUP=max(16, triton.next_power_of_2(group)),
        DIM=dim, BLOCK_DIM=max(16, triton.next_power_of_2(dim)), BLOCK_TOKENS=tile.tokens, AHEAD=tile.prefetched,
        INPUTS_READY=options["PDL"], WINDOW=window or 0, SINKS=sinks is not None, CAP=softcap,
        HALF=q.element_size() == 2 and k_pages.element_size() == 1, WORDS=reads_words(q, k_pages), num_warps=tile.warps,
        num_stages=tile.stages, **options)
