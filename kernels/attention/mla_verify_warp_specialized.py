"""Attention of verified rows over latents on a Hopper GPU: one warp loads, and two groups of four multiply.

It computes the sums of mla_verify.py over the same blocks and splits, for blocks of 64 rows and heads: the tensor
cores' tile. Both groups score a tile's tokens, and each sums up half of the latents' values: they share nothing but
what is loaded, and one multiplies while the other computes weights. Scores that are computed twice make the products
1.5 times as many, which the tensor cores still do before the next tile has come from memory.

Written in Gluon, which has no interpreter: mla_verify.py's kernel is the twin (tests/gpu compares).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .._gluon import barrier, tma_load
from .._triton import pdl, start_next, wait_for_last
from ..gemm.tma_tiles import tma_descriptor
from .decode_warp_specialized import rows_of_pages
from .verify_attention import SplitResults, VerifyPlan, block_of_split, rows_of_block

PANEL = gl.constexpr(64)
"""Values of a latent that are contiguous in shared memory: as wide as TMA's swizzle."""
VALUES = gl.constexpr(8)
"""Panels of a latent's values; those of the keys are one more."""
TOKENS = gl.constexpr(64)
ROWS = gl.constexpr(64)
"""Rows and heads of a block."""
SLOTS = gl.constexpr(2)
GROUPS = gl.constexpr(2)
REGISTERS_AT_START = 168
"""Registers of each of 384 threads; then groups that multiply have 232 and the one that loads 40."""


@gluon.jit
def _range_of(work, table, PAGE: gl.constexpr, BLOCK: gl.constexpr, PER_REQUEST: gl.constexpr):
    """``(splits of the block, its first row, the request's first row of all, its number of rows, its first page, its
    length, first token, end)`` of a split."""
    qo_indptr_ptr, kv_indptr_ptr, _, last_page_len_ptr, length_indptr_ptr, block_of_split_ptr, split_indptr_ptr = table
    block, first_split, splits, length = block_of_split(work, block_of_split_ptr, split_indptr_ptr, length_indptr_ptr)
    first_row, first_token, count, first_page, whole = rows_of_block(block, qo_indptr_ptr, kv_indptr_ptr,
                                                                     last_page_len_ptr, PAGE, BLOCK, PER_REQUEST)
    tiles = gl.cdiv(length, TOKENS)
    begin = tiles * (work - first_split) // splits * TOKENS
    end = gl.minimum(tiles * (work - first_split + 1) // splits * TOKENS, length)
    return splits, first_row, first_token, count, first_page, whole, begin, end


@gluon.jit
def _load_all(desc, ring, table, work, total, page_rows, PAGE: gl.constexpr, BLOCK: gl.constexpr,
              PER_REQUEST: gl.constexpr):
    """Runs the loading warp."""
    bufs, ready, empty = ring
    if work < total:
        _, _, _, _, first_page, _, begin, end = _range_of(work, table, PAGE, BLOCK, PER_REQUEST)
        last_page = first_page + (end - 1) // PAGE
        for start in range(begin, end, TOKENS):
            step = (start - begin) // TOKENS
            slot = step % SLOTS
            mbarrier.wait(empty.index(slot), ((step // SLOTS) & 1) ^ 1)
            rows = rows_of_pages(table[2], first_page + start // PAGE, last_page, 0, page_rows, TOKENS // PAGE)
            bar = ready.index(slot)
            mbarrier.expect(bar, (VALUES + 1) * TOKENS * PANEL * 2)
            for page in gl.static_range(TOKENS // PAGE):
                for panel in gl.static_range(VALUES + 1):
                    tma_load(desc, [rows[page], PANEL * panel], bar,
                             bufs.index(slot * (VALUES + 1) + panel).slice(PAGE * page, PAGE, 0))


@gluon.jit
def _load_panel(q_ptr, stride_t, stride_h, query_row, head, there, q_buf, offset):
    """Loads a panel of the queries."""
    value = gl.arange(0, PANEL, gl.SliceLayout(0, q_layout()))
    at = q_ptr + (query_row * stride_t + head * stride_h)[:, None] + offset + value[None, :]
    q_buf.store(gl.load(at, there[:, None], other=0.0))


@gluon.constexpr_function
def q_layout():
    return gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _load_queries(queries, q_bufs, q_ready, first_row, first_token, count, first_head, num_heads,
                  GROUP: gl.constexpr, HEADS: gl.constexpr):
    """Each group loads some of the panels; both wait for all."""
    q_ptr, qr_ptr, q_stride_t, q_stride_h, qr_stride_t, qr_stride_h = queries
    row = gl.arange(0, ROWS, gl.SliceLayout(1, q_layout()))
    head = first_head + row % HEADS
    query_row = (first_token + gl.minimum(first_row + row // HEADS, count - 1)).to(gl.int64)
    for panel in gl.static_range(VALUES // GROUPS):
        _load_panel(q_ptr, q_stride_t, q_stride_h, query_row, head, head < num_heads,
                    q_bufs.index(GROUP * (VALUES // GROUPS) + panel), (GROUP * (VALUES // GROUPS) + panel) * PANEL)
    if GROUP == 0:
        _load_panel(qr_ptr, qr_stride_t, qr_stride_h, query_row, head, head < num_heads, q_bufs.index(VALUES), 0)
    fence_async_shared()
    barrier()
    mbarrier.arrive(q_ready)
    mbarrier.wait(q_ready, 0)


@gluon.jit
def _zero_rest(bufs, first, stored):
    """Zeroes a group's values after the first ``stored`` tokens of a tile: they are arbitrary, and 0 times NaN is NaN.
    """
    token = gl.arange(0, TOKENS, gl.SliceLayout(1, q_layout()))
    for panel in gl.static_range(VALUES // GROUPS):
        buf = bufs.index(first + panel)
        values = buf.load(q_layout())
        buf.store(gl.where((token < stored)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()
    barrier()


@gluon.jit
def _attend(queries, outs, smalls, ring, table, work, total, first_head, num_heads, scale_log2, page_scale,
            GROUP: gl.constexpr, HEADS: gl.constexpr, PAGE: gl.constexpr, BLOCK: gl.constexpr,
            PER_REQUEST: gl.constexpr):
    """Runs a multiplying group: the values from the 256 * ``GROUP``-th on."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    weight_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    if work < total:
        q_bufs, q_ready = smalls
        bufs, ready, empty = ring
        splits, first_row, first_token, count, _, whole, begin, end = _range_of(work, table, PAGE, BLOCK,
                                                                                PER_REQUEST)
        _load_queries(queries, q_bufs, q_ready, first_row, first_token, count, first_head, num_heads, GROUP, HEADS)
        row = gl.arange(0, ROWS, by_row)
        in_block = row // HEADS
        token = gl.minimum(first_row + in_block, count - 1)
        visible = gl.minimum(whole - count + token + 1, end)
        column = gl.arange(0, TOKENS, gl.SliceLayout(0, mma))
        top = gl.full((ROWS,), float("-inf"), gl.float32, by_row)
        total_weight = gl.zeros((ROWS,), gl.float32, by_row)
        acc_0 = gl.zeros((ROWS, PANEL), gl.float32, mma)
        acc_1, acc_2, acc_3 = acc_0, acc_0, acc_0
        for start in range(begin, end, TOKENS):
            step = (start - begin) // TOKENS
            slot = step % SLOTS
            first = slot * (VALUES + 1)
            mbarrier.wait(ready.index(slot), (step // SLOTS) & 1)
            s = gl.zeros((ROWS, TOKENS), gl.float32, mma)
            for panel in gl.static_range(VALUES + 1):
                s = warpgroup_mma(q_bufs.index(panel), bufs.index(first + panel).permute((1, 0)), s, use_acc=panel > 0,
                                  is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,)) * scale_log2
            s = gl.where((start + column)[None, :] < visible[:, None], s, float("-inf"))
            new_top = gl.maximum(top, gl.max(s, 1))
            # A row may not have seen a latent yet: less its top, minus infinity would be NaN.
            level = gl.where(new_top == float("-inf"), 0.0, new_top)
            weights = gl.exp2(s - level[:, None])
            shrink = gl.exp2(top - level)
            total_weight = total_weight * shrink + gl.sum(weights, 1)
            top = new_top
            if start + TOKENS > end:
                _zero_rest(bufs, first + GROUP * (VALUES // GROUPS), end - start)
            p = gl.convert_layout(weights.to(q_bufs.dtype), weight_layout)
            value = first + GROUP * (VALUES // GROUPS)
            acc_0 = warpgroup_mma(p, bufs.index(value), acc_0 * shrink[:, None], is_async=True)
            acc_1 = warpgroup_mma(p, bufs.index(value + 1), acc_1 * shrink[:, None], is_async=True)
            acc_2 = warpgroup_mma(p, bufs.index(value + 2), acc_2 * shrink[:, None], is_async=True)
            acc_3 = warpgroup_mma(p, bufs.index(value + 3), acc_3 * shrink[:, None], is_async=True)
            acc_0, acc_1, acc_2, acc_3 = warpgroup_mma_wait(0, deps=(acc_0, acc_1, acc_2, acc_3))
            mbarrier.arrive(empty.index(slot))
        out_ptr, part_ptr, lse_ptr = outs
        head = first_head + row % HEADS
        stored = (in_block < BLOCK) & (first_row + in_block < count) & (head < num_heads)
        factor = (page_scale / gl.where(total_weight == 0.0, 1.0, total_weight))[:, None]
        WIDTH: gl.constexpr = VALUES * PANEL
        value = GROUP * (WIDTH // GROUPS) + gl.arange(0, PANEL, gl.SliceLayout(0, mma))
        if splits == 1:
            out_at = out_ptr + ((first_token + token).to(gl.int64) * num_heads + head)[:, None] * WIDTH + value[None, :]
            kind: gl.constexpr = out_ptr.dtype.element_ty
            gl.store(out_at, (acc_0 * factor).to(kind), stored[:, None])
            gl.store(out_at + PANEL, (acc_1 * factor).to(kind), stored[:, None])
            gl.store(out_at + 2 * PANEL, (acc_2 * factor).to(kind), stored[:, None])
            gl.store(out_at + 3 * PANEL, (acc_3 * factor).to(kind), stored[:, None])
        else:  # a row may see nothing of a split: its weight is zero then
            part = (work.to(gl.int64) * BLOCK + in_block) * num_heads + head
            if GROUP == 0:
                lse = gl.where(total_weight == 0.0, float("-inf"), top + gl.log2(total_weight))
                gl.store(lse_ptr + part, lse, stored)
            at = part_ptr + part[:, None] * WIDTH + value[None, :]
            gl.store(at, acc_0 * factor, stored[:, None])
            gl.store(at + PANEL, acc_1 * factor, stored[:, None])
            gl.store(at + 2 * PANEL, acc_2 * factor, stored[:, None])
            gl.store(at + 3 * PANEL, acc_3 * factor, stored[:, None])


# Batches of other sizes must not recompile the kernel.
@gluon.jit(do_not_specialize=["blocks"])
def _mla_verify_warp_specialized_kernel(
        q_ptr, qr_ptr, desc, out_ptr, part_ptr, lse_ptr, qo_indptr_ptr, kv_indptr_ptr, kv_indices_ptr,
        last_page_len_ptr, length_indptr_ptr, block_of_split_ptr, split_indptr_ptr, blocks, scale_log2, page_scale,
        q_stride_t, q_stride_h, qr_stride_t, qr_stride_h, page_rows, num_heads, HEADS: gl.constexpr,
        PAGE: gl.constexpr, BLOCK: gl.constexpr, PER_REQUEST: gl.constexpr, PDL: gl.constexpr):
    start_next(PDL)
    bufs = gl.allocate_shared_memory(desc.dtype, [SLOTS * (VALUES + 1), TOKENS, PANEL], desc.layout)
    q_bufs = gl.allocate_shared_memory(desc.dtype, [VALUES + 1, ROWS, PANEL], desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    mbarrier.init(q_ready, count=GROUPS)
    fence_async_shared()
    wait_for_last(PDL)
    work = gl.program_id(1)
    total = gl.load(split_indptr_ptr + blocks)
    first_head = gl.program_id(0) * HEADS
    ring, smalls, outs = (bufs, ready, empty), (q_bufs, q_ready), (out_ptr, part_ptr, lse_ptr)
    queries = (q_ptr, qr_ptr, q_stride_t, q_stride_h, qr_stride_t, qr_stride_h)
    table = (qo_indptr_ptr, kv_indptr_ptr, kv_indices_ptr, last_page_len_ptr, length_indptr_ptr, block_of_split_ptr,
             split_indptr_ptr)
    gl.warp_specialize([
        (_attend, (queries, outs, smalls, ring, table, work, total, first_head, num_heads, scale_log2, page_scale,
                   gl.constexpr(0), HEADS, PAGE, BLOCK, PER_REQUEST)),
        (_attend, (queries, outs, smalls, ring, table, work, total, first_head, num_heads, scale_log2, page_scale,
                   gl.constexpr(1), HEADS, PAGE, BLOCK, PER_REQUEST)),
        (_load_all, (desc, ring, table, work, total, page_rows, PAGE, BLOCK, PER_REQUEST)),
    ], [4, 1], [232, 40])


def mla_verify_warp_specialized(q: torch.Tensor, q_rope: torch.Tensor, pages: torch.Tensor, qo_indptr: torch.Tensor,
                                kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor,
                                scale: float, plan: VerifyPlan, heads: int, page_scale: float, out: torch.Tensor,
                                results: SplitResults) -> None:
    """Computes ``mla_verify`` of chains, of ``heads`` heads and ``plan.rows`` rows a block, without the merge. Latents
    are of 512 + 64 values of 16 bits, pages of 16, 32 or 64 tokens."""
    num_heads, splits = q.shape[1], plan.splits
    _mla_verify_warp_specialized_kernel[(-(-num_heads // heads), results.max_splits)](
        q, q_rope, _latents(pages), out, results.parts, results.lses, qo_indptr, kv_indptr, kv_indices,
        kv_last_page_len, plan.length_indptr, splits.request_of_split, splits.split_indptr,
        len(splits.split_indptr) - 1, scale * page_scale * 1.4426950408889634, page_scale, q.stride(0), q.stride(1),
        q_rope.stride(0), q_rope.stride(1), pages.stride(0) // pages.stride(1), num_heads, HEADS=heads,
        PAGE=pages.shape[1], BLOCK=plan.rows, PER_REQUEST=plan.blocks_per_request, num_warps=4,
        maxnreg=REGISTERS_AT_START, **pdl(q))


def _latents(pages: torch.Tensor) -> TensorDescriptor:
    """Describes all latents in the memory of ``pages`` [pages, page_size, 576], by panels of a page."""
    width = pages.shape[2]
    rows = sum((size - 1) * stride for size, stride in zip(pages.shape[:2], pages.stride())) // width + 1
    return tma_descriptor(pages.as_strided((rows, width), (width, 1)), pages.shape[1], 64)
