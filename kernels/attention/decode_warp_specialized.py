"""Decode attention of many requests on a Hopper GPU, warp-specialized: one warp loads and a group of four multiplies.

It computes the sums of paged_decode.py over the same splits, transposed: tokens are the rows of both products and query
heads their columns, of which 8 are the minimum, while rows would be padded to 16. TMA moves keys and values from pages
into shared memory, from where the tensor cores read them: no register holds them. A step of many requests is bound by
the card's power, and the power that this saves raises the clock of the products that follow.

Weights are relative to a maximum that is renewed only when scores exceed it by a factor of 2^8: else nothing is
rescaled, and warps synchronize twice a tile. 16-bit weights of at most 256 are as precise as those of at most 1.

Written in Gluon, which has no interpreter: paged_decode.py's kernel is the twin (tests/gpu compares).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._gluon import barrier, tma_load
from .._triton import pdl, start_next, wait_for_last
from ..gemm.tma_tiles import tma_descriptor
from .decode_plan import DecodePlan, split_range

DIM = gl.constexpr(128)
HALF = gl.constexpr(64)
"""Values of a head that are contiguous in shared memory: as wide as TMA's swizzle."""
TOKENS = gl.constexpr(128)
"""Tokens of a tile."""
SLOTS = gl.constexpr(3)
"""Tiles of keys or values that are loaded or in flight; two programs fit an SM."""
OUTGROWN = gl.constexpr(8.0)
REGISTERS = 128
"""Registers of each of 256 threads; then the loading warp has 40, and the others more."""


@gluon.jit
def rows_of_pages(indices_ptr, first, last, head_row, page_rows, COUNT: gl.constexpr):
    """First rows of a head in ``COUNT`` pages from the ``first``-th on; after the last page that one is repeated."""
    if COUNT == 1:
        page = gl.load(indices_ptr + gl.minimum(first, last), cache_modifier=".cg")
        rows = (page * page_rows + head_row,)
    else:
        rows = (rows_of_pages(indices_ptr, first, last, head_row, page_rows, COUNT // 2)
                + rows_of_pages(indices_ptr, first + COUNT // 2, last, head_row, page_rows, COUNT // 2))
    return rows


@gluon.jit
def _load(desc, ring, step, rows, PAGE: gl.constexpr, PARTS: gl.constexpr, SLOTS: gl.constexpr):
    """Loads a tile of keys or of values, once the slot's previous content has been read. ``PARTS`` of each head, of 128
    bytes, are apart in shared memory."""
    bufs, ready, empty = ring
    slot = step % SLOTS
    mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
    bar = ready.index(slot)
    mbarrier.expect(bar, TOKENS * 128 * PARTS)
    for page in gl.static_range(TOKENS // PAGE):
        for part in gl.static_range(PARTS):
            tma_load(desc, [rows[page], HALF * part], bar, bufs.index(PARTS * slot + part).slice(PAGE * page, PAGE, 0))


@gluon.jit
def load_all(k_desc, v_desc, table, ring, requests, heads, page_rows, head_rows, PAGE: gl.constexpr,
             PARTS: gl.constexpr, SLOTS: gl.constexpr, PDL: gl.constexpr):
    """Runs the loading warp. With PDL all but a split's last tile was written before the previous kernel."""
    request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr, kv_indices_ptr, last_page_len_ptr = table
    step = 0
    splits = gl.load(split_indptr_ptr + requests, cache_modifier=".cg")
    for work in range(gl.program_id(0), splits * heads, gl.num_programs(0)):
        _, _, first_page, begin, end = split_range(work // heads, request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr,
                                               last_page_len_ptr, PAGE, TOKENS)
        last_page = first_page + (end - 1) // PAGE
        for start in range(begin, end, TOKENS):
            if start + TOKENS >= end:
                wait_for_last(PDL)
            rows = rows_of_pages(kv_indices_ptr, first_page + start // PAGE, last_page, work % heads * head_rows,
                                 page_rows, TOKENS // PAGE)
            _load(k_desc, ring, step, rows, PAGE, PARTS, SLOTS)
            _load(v_desc, ring, step + 1, rows, PAGE, PARTS, SLOTS)
            step += 2


@gluon.jit
def _zero_rest(bufs, slot, stored, DTYPE: gl.constexpr):
    """Zeroes a tile's values after the first ``stored`` tokens: they are arbitrary, and 0 times NaN would be NaN."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, layout))
    for half in gl.static_range(2):
        buf = bufs.index(2 * slot + half)
        buf.store(gl.where((token < stored)[:, None], buf.load(layout), 0.0).to(DTYPE))


@gluon.jit
def store_max_scores(scores, m_buf, COLUMNS: gl.constexpr):
    """Writes each warp's largest score of each head to shared memory."""
    m_buf.store(gl.max(gl.max(scores.reshape([TOKENS // 64, 4, 16, COLUMNS]), 0), 1))


@gluon.jit
def _attend_split(ring, step, q_bufs, p_buf, m_buf, tokens, scale_log2, COLUMNS: gl.constexpr, DTYPE: gl.constexpr):
    """``(sums of values [64, COLUMNS], of the heads' other half, sums of weights [COLUMNS], maxima, next step)``."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    spread: gl.constexpr = gl.BlockedLayout([4, 2], [8, 4], [4, 1], [1, 0])
    by_head: gl.constexpr = gl.SliceLayout(0, mma)
    bufs, ready, empty = ring
    row = gl.arange(0, TOKENS, gl.SliceLayout(1, mma))
    top = gl.full((COLUMNS,), float("-inf"), gl.float32, by_head)
    total = gl.zeros((TOKENS, COLUMNS), gl.float32, mma)
    low = warpgroup_mma_init(gl.zeros((HALF, COLUMNS), gl.float32, mma))
    high = warpgroup_mma_init(gl.zeros((HALF, COLUMNS), gl.float32, mma))
    for start in range(0, tokens, TOKENS):
        slot = step % SLOTS
        mbarrier.wait(ready.index(slot), (step // SLOTS) & 1)
        s = warpgroup_mma(bufs.index(2 * slot), q_bufs.index(0).permute((1, 0)),
                          gl.zeros((TOKENS, COLUMNS), gl.float32, mma), use_acc=False, is_async=True)
        s = warpgroup_mma(bufs.index(2 * slot + 1), q_bufs.index(1).permute((1, 0)), s, is_async=True)
        scores, low_sum, high_sum = warpgroup_mma_wait(0, deps=(s, low, high))
        barrier()  # all warps have read these keys, and the last tile's values and weights
        mbarrier.arrive(empty.index(slot))
        mbarrier.arrive(empty.index((step + SLOTS - 1) % SLOTS), pred=start > 0)
        if start + TOKENS > tokens:
            scores = gl.where((start + row < tokens)[:, None], scores, float("-inf"))
        store_max_scores(scores, m_buf, COLUMNS)
        weights = gl.exp2(scores * scale_log2 - top[None, :])
        p_buf.store(weights.to(DTYPE).permute(1, 0))
        slot = (step + 1) % SLOTS
        mbarrier.wait(ready.index(slot), ((step + 1) // SLOTS) & 1)
        if start + TOKENS > tokens:
            _zero_rest(bufs, slot, tokens - start, DTYPE)
        fence_async_shared()
        barrier()
        new_top = gl.convert_layout(gl.max(m_buf.load(spread), 0), by_head) * scale_log2
        if gl.max(new_top - top, 0) > OUTGROWN:
            new_top = gl.maximum(new_top, top)
            shrink = gl.exp2(top - new_top)[None, :]
            low_sum, high_sum, total, top = low_sum * shrink, high_sum * shrink, total * shrink, new_top
            weights = gl.exp2(scores * scale_log2 - top[None, :])
            p_buf.store(weights.to(DTYPE).permute(1, 0))
            fence_async_shared()
            barrier()
        total += weights
        low = warpgroup_mma(bufs.index(2 * slot).permute((1, 0)), p_buf.permute((1, 0)), low_sum, is_async=True)
        high = warpgroup_mma(bufs.index(2 * slot + 1).permute((1, 0)), p_buf.permute((1, 0)), high_sum, is_async=True)
        step += 2
    low_sum, high_sum = warpgroup_mma_wait(0, deps=(low, high))
    barrier()
    mbarrier.arrive(empty.index((step + SLOTS - 1) % SLOTS))
    return low_sum, high_sum, gl.sum(total, 0), top, step


@gluon.jit
def _load_queries(q_ptr, q_bufs, stride_h, GROUP: gl.constexpr, COLUMNS: gl.constexpr):
    """Loads the queries of a KV head, in two halves of D; zeros in columns without a query head."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    head = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, HALF, gl.SliceLayout(0, layout))
    at = q_ptr + head[:, None] * stride_h + dim[None, :]
    there = (head < GROUP)[:, None] & (dim < HALF)[None, :]
    low, high = gl.load(at, there, other=0.0), gl.load(at + HALF, there, other=0.0)
    barrier()  # the previous split's products have read theirs
    q_bufs.index(0).store(low)
    q_bufs.index(1).store(high)
    fence_async_shared()
    barrier()


@gluon.jit
def _attend_all(q_ptr, outs, table, ring, smalls, requests, heads, strides, scale_log2, v_scale, GROUP: gl.constexpr,
                COLUMNS: gl.constexpr, PAGE: gl.constexpr, PDL: gl.constexpr):
    """Runs the multiplying group."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr, kv_indices_ptr, last_page_len_ptr = table
    out_ptr, part_ptr, lse_ptr = outs
    q_bufs, p_buf, m_buf = smalls
    wait_for_last(PDL)
    dim = gl.arange(0, HALF, gl.SliceLayout(1, mma))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, mma))
    stored = (column < GROUP)[None, :] & (dim < HALF)[:, None]
    step = 0
    count = gl.load(split_indptr_ptr + requests, cache_modifier=".cg")
    for work in range(gl.program_id(0), count * heads, gl.num_programs(0)):
        split, head = work // heads, work % heads
        request, splits, _, begin, end = split_range(split, request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr,
                                                     last_page_len_ptr, PAGE, TOKENS)
        _load_queries(q_ptr + request * strides[0] + head * GROUP * strides[1], q_bufs, strides[1], GROUP, COLUMNS)
        low, high, total, top, step = _attend_split(ring, step, q_bufs, p_buf, m_buf, end - begin, scale_log2, COLUMNS,
                                                    q_ptr.dtype.element_ty)
        low, high = low * (v_scale / total)[None, :], high * (v_scale / total)[None, :]
        at = (head * GROUP + column)[None, :] * DIM + dim[:, None]
        if splits == 1:
            out = out_ptr + request * heads * GROUP * DIM + at
            gl.store(out, low.to(out_ptr.dtype.element_ty), stored)
            gl.store(out + HALF, high.to(out_ptr.dtype.element_ty), stored)
        else:
            first = split.to(gl.int64) * heads * GROUP
            gl.store(lse_ptr + first + head * GROUP + column, top + gl.log2(total), column < GROUP)
            gl.store(part_ptr + first * DIM + at, low, stored)
            gl.store(part_ptr + first * DIM + at + HALF, high, stored)


# Batches of other sizes must not recompile the kernel.
@gluon.jit(do_not_specialize=["requests"])
def _decode_warp_specialized_kernel(q_ptr, k_desc, v_desc, out_ptr, part_ptr, lse_ptr, kv_indptr_ptr, kv_indices_ptr,
                                    last_page_len_ptr, request_of_split_ptr, split_indptr_ptr, requests, heads,
                                    q_stride_t, q_stride_h, page_rows, head_rows, scale_log2, v_scale,
                                    GROUP: gl.constexpr, COLUMNS: gl.constexpr, PAGE: gl.constexpr, PDL: gl.constexpr):
    start_next(PDL)
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    bufs = gl.allocate_shared_memory(DTYPE, [2 * SLOTS, TOKENS, HALF], k_desc.layout)
    q_bufs = gl.allocate_shared_memory(DTYPE, [2, COLUMNS, HALF], k_desc.layout)
    p_buf = gl.allocate_shared_memory(DTYPE, [COLUMNS, TOKENS], k_desc.layout)
    m_buf = gl.allocate_shared_memory(gl.float32, [4, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    ring, smalls = (bufs, ready, empty), (q_bufs, p_buf, m_buf)
    table = (request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr, kv_indices_ptr, last_page_len_ptr)
    gl.warp_specialize([
        (_attend_all, (q_ptr, (out_ptr, part_ptr, lse_ptr), table, ring, smalls, requests, heads,
                       (q_stride_t, q_stride_h), scale_log2, v_scale, GROUP, COLUMNS, PAGE, PDL)),
        (load_all, (k_desc, v_desc, table, ring, requests, heads, page_rows, head_rows, PAGE, 2, SLOTS, PDL)),
    ], [1], [40])


def decode_warp_specialized(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, kv_indptr: torch.Tensor,
                            kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor, scale: float, plan: DecodePlan,
                            v_scale: float, inputs_ready: bool,
                            outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Computes ``paged_decode`` for arguments that ``supports_warp_specialized``, into ``outs``: results [B, Hq, D],
    and of requests with several splits each split's results [most splits, Hq, D] and log-sum-exps [most splits, Hq] in
    float32."""
    heads, page_size = k_pages.shape[1:3]
    group = q.shape[1] // heads
    # One for each split and KV head. 264 persistent ones were 2 % slower at 256 requests.
    programs = heads * (len(plan.request_of_split) if plan.needs_merge else len(q))
    _decode_warp_specialized_kernel[(programs,)](
        q, pages_of(k_pages, 64), pages_of(v_pages, 64), *outs, kv_indptr, kv_indices, kv_last_page_len,
        plan.request_of_split, plan.split_indptr, q.shape[0], heads, q.stride(0), q.stride(1), k_pages.stride(0) // 128,
        k_pages.stride(1) // 128, scale * 1.4426950408889634, v_scale, GROUP=group,
        COLUMNS=max(8, 1 << (group - 1).bit_length()), PAGE=page_size, num_warps=4, maxnreg=REGISTERS,
        **(pdl(q) if inputs_ready else {"PDL": False}))


def pages_of(pages: torch.Tensor, columns: int) -> TensorDescriptor:
    """Describes all rows of 128 values in the memory of ``pages`` [pages, Hkv, page_size, 128], by a page's first or
    other ``columns``."""
    rows = sum((size - 1) * stride for size, stride in zip(pages.shape[:3], pages.stride())) // 128 + 1
    return tma_descriptor(pages.as_strided((rows, 128), (128, 1)), pages.shape[2], columns)
