"""The kernel of mla_decode.py for 16 heads or fewer: tokens are the rows of its products, and heads the columns.

A tensor core product of Hopper has at least 64 rows. With heads as rows 16 of them would leave three quarters idle, so
that the compiler falls back to the products of older GPUs, which go through registers. Transposed, both products read
the latents from shared memory, where loads put them, and 16 heads are the minimum of columns.
"""

from __future__ import annotations

from .._triton import start_next, tl, triton, wait_for_last
from .decode_plan import split_range


@triton.jit(do_not_specialize=["requests"])
def _mla_decode_narrow_kernel(q_ptr, qr_ptr, pages_ptr, out_ptr, part_ptr, lse_ptr,
                              kv_indptr_ptr, kv_indices_ptr, last_page_len_ptr, request_of_split_ptr,
                              split_indptr_ptr, requests, scale_log2, page_scale, q_stride_t, q_stride_h, qr_stride_t,
                              qr_stride_h, stride_page, stride_slot,
                              num_heads, PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr,
                              BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_HEADS: tl.constexpr,
                              BLOCK_TOKENS: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    split = tl.program_id(0)
    if split >= tl.load(split_indptr_ptr + requests):
        return
    request, splits, first_page, begin, end = split_range(split, request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr,
                                                          last_page_len_ptr, PAGE, BLOCK_TOKENS)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_RANK)
    rope = tl.arange(0, BLOCK_ROPE)
    offset = tl.arange(0, BLOCK_TOKENS)
    real = heads < num_heads
    in_rank, in_rope = (dim < RANK)[None, :], (rope < ROPE)[None, :]
    page = tl.load(kv_indices_ptr + first_page + (begin + offset) // PAGE, begin + offset < end, other=0)
    q = tl.load(q_ptr + request * q_stride_t + heads[:, None] * q_stride_h + dim[None, :], real[:, None] & in_rank,
                other=0.0)
    qr = tl.load(qr_ptr + request * qr_stride_t + heads[:, None] * qr_stride_h + rope[None, :],
                 real[:, None] & in_rope, other=0.0)
    top = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    acc = tl.zeros((BLOCK_RANK, BLOCK_HEADS), tl.float32)
    for start in range(begin, end, BLOCK_TOKENS):
        token = start + offset
        present = token < end
        slot = page.to(tl.int64) * stride_page + (token % PAGE) * stride_slot
        # The next iteration's: loads of latents that wait for page ids in their own iteration are never pipelined.
        page = tl.load(kv_indices_ptr + first_page + (token + BLOCK_TOKENS) // PAGE, token + BLOCK_TOKENS < end,
                       other=0)
        latent = tl.load(pages_ptr + slot[:, None] + dim[None, :], present[:, None] & in_rank, other=0.0).to(q.dtype)
        key = tl.load(pages_ptr + slot[:, None] + RANK + rope[None, :], present[:, None] & in_rope,
                      other=0.0).to(q.dtype)
        scores = tl.dot(latent, tl.trans(q), input_precision="ieee")
        scores = tl.dot(key, tl.trans(qr), scores, input_precision="ieee")
        scores = tl.where(present[:, None], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        weights = tl.exp2(scores - new_top[None, :])
        shrink = tl.exp2(top - new_top)
        acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc * shrink[None, :], input_precision="ieee")
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    result = acc / total[None, :] * page_scale
    stored = real[None, :] & (dim < RANK)[:, None]
    if splits == 1:
        row = request * num_heads + heads
        tl.store(out_ptr + row[None, :] * RANK + dim[:, None], result.to(out_ptr.dtype.element_ty), stored)
    else:
        row = split.to(tl.int64) * num_heads + heads
        tl.store(lse_ptr + row, top + tl.log2(total), real)
        tl.store(part_ptr + row[None, :] * RANK + dim[:, None], result, stored)
