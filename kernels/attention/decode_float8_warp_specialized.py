"""Decode attention of many requests over float8 keys and values on a Hopper GPU, warp-specialized.

The splits, the loading warp and the transposed products are decode_warp_specialized.py's. Half of the bytes leaves half
of the time, so nothing may convert what the tensor cores can take:

- Keys are multiplied as they are stored. Queries become two float8 columns each: the value by a power of two that suits
  its head, and what rounding left of it, 16 times as large. Together they have the 8 bits of a bfloat16. Tensor cores
  align float8 products to 2^-13 of the largest before they add them up.
- Values are the first operand of the second product, which takes float8 only where tokens are contiguous. Each thread
  loads words of four values of a token, brings the values of two tokens together and moves their bits into float16
  (e4m3's exponents are float16's but for a factor of 2^8): this is the operand's layout in registers if rows are
  counted as ``_dim_of`` does. Nothing is written back to shared memory.

paged_decode.py's kernel is the twin (tests/gpu compares).
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

from .._gluon import barrier, reinterpret
from .._triton import pdl, start_next, wait_for_last
from .decode_plan import DecodePlan, split_range
from .decode_warp_specialized import DIM, HALF, OUTGROWN, REGISTERS, TOKENS, load_all, pages_of, store_max_scores

SLOTS = gl.constexpr(4)
"""Tiles of keys or values that are loaded or in flight; two programs fit an SM."""
VALUE_FACTOR = 2.0**8
"""A value is this times the float16 that its bits are moved into."""
REST = gl.constexpr(16.0)
"""Factor of what rounding left of a query."""


@gluon.jit
def _halves_of(words):
    """Turns words of four e4m3 values [tokens, words] into four float16 [tokens, words], 2^-8 times as large."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 pair, moved;
        prmt.b32 pair, $4, $5, 0x4000; and.b32 moved, pair, 0x7f007f00; shr.u32 moved, moved, 1;
        lop3.b32 $0, pair, 0x80008000, moved, 0xea;
        prmt.b32 pair, $4, $5, 0x5010; and.b32 moved, pair, 0x7f007f00; shr.u32 moved, moved, 1;
        lop3.b32 $1, pair, 0x80008000, moved, 0xea;
        prmt.b32 pair, $4, $5, 0x6020; and.b32 moved, pair, 0x7f007f00; shr.u32 moved, moved, 1;
        lop3.b32 $2, pair, 0x80008000, moved, 0xea;
        prmt.b32 pair, $4, $5, 0x7030; and.b32 moved, pair, 0x7f007f00; shr.u32 moved, moved, 1;
        lop3.b32 $3, pair, 0x80008000, moved, 0xea;
        }""",
        "=r,=r,=r,=r,r,r", [words], dtype=(gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2)


@gluon.jit
def _operand(even, odd, layout: gl.constexpr):
    """Joins two of every four values [TOKENS, 32] to a first operand of 64 rows by TOKENS; no value changes its thread.
    A warp has 16 rows, whose first 8 are of ``even``."""
    rows = gl.join(even, odd).permute(1, 2, 0).reshape([4, 8, 2, TOKENS]).permute(0, 2, 1, 3).reshape([HALF, TOKENS])
    return gl.convert_layout(rows, layout, assert_trivial=True)


@gluon.jit
def _dim_of(row):
    """The first product row's value of a head; the second's is the one 2 after it."""
    return row // 16 * 32 + row % 8 * 4 + row // 8 % 2


@gluon.jit
def _attend_split(ring, step, q_buf, p_buf, m_buf, tokens, scales, COLUMNS: gl.constexpr):
    """``(sums of values [64, COLUMNS], of the other values, sums of weights [COLUMNS], maxima, next step)``. Both
    columns of a query have the same sums."""
    s_mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 32])
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    spread: gl.constexpr = gl.BlockedLayout([4, 2], [8, 4], [4, 1], [1, 0])
    by_head: gl.constexpr = gl.SliceLayout(0, mma)
    # Two neighbouring tokens' words in a thread's registers; loads of a warp meet all banks once.
    words_of: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [8, 0], [16, 0], [32, 0], [64, 0]], [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]], [],
        [TOKENS, DIM // 4])
    stored_words: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    bufs, ready, empty = ring
    row = gl.arange(0, TOKENS, gl.SliceLayout(1, mma))
    top = gl.full((COLUMNS,), float("-inf"), gl.float32, by_head)
    total = gl.zeros((TOKENS, COLUMNS), gl.float32, mma)
    low_sum = gl.zeros((HALF, COLUMNS), gl.float32, mma)
    high_sum = gl.zeros((HALF, COLUMNS), gl.float32, mma)
    for start in range(0, tokens, TOKENS):
        slot = step % SLOTS
        mbarrier.wait(ready.index(slot), (step // SLOTS) & 1)
        s = warpgroup_mma(bufs.index(slot), q_buf.permute((1, 0)), gl.zeros((TOKENS, COLUMNS), gl.float32, s_mma),
                          use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        barrier()  # all warps have read these keys, and the last tile's values and weights
        mbarrier.arrive(empty.index(slot))
        mbarrier.arrive(empty.index((step + SLOTS - 1) % SLOTS), pred=start > 0)
        value, rest = gl.split(s.reshape([TOKENS, COLUMNS // 2, 2]))
        value += rest * (1 / REST)
        scores = gl.convert_layout(gl.join(value, value).reshape([TOKENS, COLUMNS]), mma)
        if start + TOKENS > tokens:
            scores = gl.where((start + row < tokens)[:, None], scores, float("-inf"))
        store_max_scores(scores, m_buf, COLUMNS)
        weights = gl.exp2(scores * scales[None, :] - top[None, :])
        p_buf.store(weights.to(gl.float16).permute(1, 0))
        slot = (step + 1) % SLOTS
        mbarrier.wait(ready.index(slot), ((step + 1) // SLOTS) & 1)
        first, second, third, fourth = _halves_of(
            reinterpret(bufs.index(slot), gl.int32, [TOKENS, DIM // 4], stored_words).load(words_of))
        low_values, high_values = _operand(first, second, operand), _operand(third, fourth, operand)
        fence_async_shared()
        barrier()
        new_top = gl.convert_layout(gl.max(m_buf.load(spread), 0), by_head) * scales
        if gl.max(new_top - top, 0) > OUTGROWN:
            new_top = gl.maximum(new_top, top)
            shrink = gl.exp2(top - new_top)[None, :]
            low_sum, high_sum, total, top = low_sum * shrink, high_sum * shrink, total * shrink, new_top
            weights = gl.exp2(scores * scales[None, :] - top[None, :])
            p_buf.store(weights.to(gl.float16).permute(1, 0))
            fence_async_shared()
            barrier()
        total += weights
        low = warpgroup_mma(low_values, p_buf.permute((1, 0)), low_sum, is_async=True)
        high = warpgroup_mma(high_values, p_buf.permute((1, 0)), high_sum, is_async=True)
        # Products read their operands' registers until they end: no other value may get these before.
        low_sum, high_sum, _, _ = warpgroup_mma_wait(0, deps=(low, high, low_values, high_values))
        step += 2
    barrier()
    mbarrier.arrive(empty.index((step + SLOTS - 1) % SLOTS))
    return low_sum, high_sum, gl.sum(total, 0), top, step


@gluon.jit
def _load_queries(q_ptr, q_buf, stride_h, GROUP: gl.constexpr, COLUMNS: gl.constexpr, to: gl.constexpr):
    """Loads the queries of a KV head as two float8 columns each, and returns [COLUMNS] by which scores are to be
    multiplied; zeros in columns without a query head."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    there = (column < 2 * GROUP)[:, None] & (dim < DIM)[None, :]
    q = gl.load(q_ptr + (column // 2)[:, None] * stride_h + dim[None, :], there, other=0.0).to(gl.float32)
    # A power of two that makes the head's largest value 128 to 256; float8 represents 448.
    exponent = gl.max(gl.abs(q), 1).to(gl.int32, bitcast=True) >> 23
    exponent = gl.minimum(261 - exponent, 187)
    q *= (exponent << 23).to(gl.float32, bitcast=True)[:, None]
    rounded = q.to(gl.float8e4nv).to(gl.float32)
    # (Both parts joined, permuted and reshaped to columns were wrong in shared memory: Triton 3.6.)
    q = gl.where((column % 2 == 0)[:, None], rounded, (q - rounded) * REST)
    barrier()  # the previous split's products have read theirs
    q_buf.store(q.to(gl.float8e4nv))
    fence_async_shared()
    barrier()
    return gl.convert_layout(((254 - exponent) << 23).to(gl.float32, bitcast=True), to)


@gluon.jit
def _attend_all(q_ptr, outs, table, ring, smalls, requests, heads, strides, scale_log2, v_scale, GROUP: gl.constexpr,
                COLUMNS: gl.constexpr, PAGE: gl.constexpr, PDL: gl.constexpr):
    """Runs the multiplying group."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr, kv_indices_ptr, last_page_len_ptr = table
    out_ptr, part_ptr, lse_ptr = outs
    q_buf, p_buf, m_buf = smalls
    wait_for_last(PDL)
    dim = _dim_of(gl.arange(0, HALF, gl.SliceLayout(1, mma)))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, mma))
    written = (column < 2 * GROUP) & (column % 2 == 0)
    stored = written[None, :] & (dim < DIM)[:, None]
    step = 0
    count = gl.load(split_indptr_ptr + requests, cache_modifier=".cg")
    for work in range(gl.program_id(0), count * heads, gl.num_programs(0)):
        split, head = work // heads, work % heads
        request, splits, _, begin, end = split_range(split, request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr,
                                                     last_page_len_ptr, PAGE, TOKENS)
        scales = scale_log2 * _load_queries(q_ptr + request * strides[0] + head * GROUP * strides[1], q_buf, strides[1],
                                            GROUP, COLUMNS, gl.SliceLayout(0, mma))
        low, high, total, top, step = _attend_split(ring, step, q_buf, p_buf, m_buf, end - begin, scales, COLUMNS)
        low, high = low * (v_scale / total)[None, :], high * (v_scale / total)[None, :]
        at = (head * GROUP + column // 2)[None, :] * DIM + dim[:, None]
        if splits == 1:
            out = out_ptr + request * heads * GROUP * DIM + at
            gl.store(out, low.to(out_ptr.dtype.element_ty), stored)
            gl.store(out + 2, high.to(out_ptr.dtype.element_ty), stored)
        else:
            first = split.to(gl.int64) * heads * GROUP
            gl.store(lse_ptr + first + head * GROUP + column // 2, top + gl.log2(total), written)
            gl.store(part_ptr + first * DIM + at, low, stored)
            gl.store(part_ptr + first * DIM + at + 2, high, stored)


# Batches of other sizes must not recompile the kernel.
@gluon.jit(do_not_specialize=["requests"])
def _decode_float8_warp_specialized_kernel(q_ptr, k_desc, v_desc, out_ptr, part_ptr, lse_ptr, kv_indptr_ptr,
                                           kv_indices_ptr, last_page_len_ptr, request_of_split_ptr, split_indptr_ptr,
                                           requests, heads, q_stride_t, q_stride_h, page_rows, head_rows, scale_log2,
                                           v_scale, GROUP: gl.constexpr, COLUMNS: gl.constexpr, PAGE: gl.constexpr,
                                           PDL: gl.constexpr):
    start_next(PDL)
    bufs = gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, TOKENS, DIM], k_desc.layout)
    q_buf = gl.allocate_shared_memory(gl.float8e4nv, [COLUMNS, DIM], k_desc.layout)
    p_buf = gl.allocate_shared_memory(gl.float16, [COLUMNS, TOKENS], gl.NVMMASharedLayout(128, 16, 2))
    m_buf = gl.allocate_shared_memory(gl.float32, [4, COLUMNS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(ready.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    fence_async_shared()
    ring, smalls = (bufs, ready, empty), (q_buf, p_buf, m_buf)
    table = (request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr, kv_indices_ptr, last_page_len_ptr)
    gl.warp_specialize([
        (_attend_all, (q_ptr, (out_ptr, part_ptr, lse_ptr), table, ring, smalls, requests, heads,
                       (q_stride_t, q_stride_h), scale_log2, v_scale, GROUP, COLUMNS, PAGE, PDL)),
        (load_all, (k_desc, v_desc, table, ring, requests, heads, page_rows, head_rows, PAGE, 1, SLOTS, PDL)),
    ], [1], [40])


def decode_float8_warp_specialized(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
                                   kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor,
                                   scale: float, plan: DecodePlan, v_scale: float, inputs_ready: bool,
                                   outs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    """Computes ``paged_decode`` of float8 (e4m3) pages, as ``decode_warp_specialized`` does of 16-bit ones."""
    heads, page_size = k_pages.shape[1:3]
    group = q.shape[1] // heads
    programs = heads * (len(plan.request_of_split) if plan.needs_merge else len(q))
    _decode_float8_warp_specialized_kernel[(programs,)](
        q, pages_of(k_pages, 128), pages_of(v_pages, 128), *outs, kv_indptr, kv_indices, kv_last_page_len,
        plan.request_of_split, plan.split_indptr, q.shape[0], heads, q.stride(0), q.stride(1), k_pages.stride(0) // 128,
        k_pages.stride(1) // 128, scale * 1.4426950408889634, v_scale * VALUE_FACTOR, GROUP=group,
        COLUMNS=max(8, 2 << (group - 1).bit_length()), PAGE=page_size, num_warps=4, maxnreg=REGISTERS,
        **(pdl(q) if inputs_ready else {"PDL": False}))
