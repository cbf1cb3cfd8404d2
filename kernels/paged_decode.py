"""Attention of one query row a request over its pages, split along the sequence.

A decode step has few programs (requests x KV heads) with long loops: splitting the keys over several programs fills
the GPU, and a second, small kernel joins the parts by their log-sum-exps (Flash-Decoding, Dao et al., 2023). With one
split there is nothing to join, and the first kernel writes the result: that saves 10 us a layer at 64 requests.
"""

from __future__ import annotations

import torch

from . import reference
from ._triton import runs_triton, tl, triton
from .join_splits import join_splits

_BLOCK_TOKENS = 64


# Without ``do_not_specialize`` a step whose splits are the first to be a multiple of 16 would compile anew: a second's
# pause for every running request.
@triton.jit(do_not_specialize=["splits"])
def _paged_decode_kernel(q_ptr, k_pages_ptr, v_pages_ptr, part_ptr, lse_ptr, kv_indptr_ptr, kv_indices_ptr,
                         last_page_len_ptr, scale_log2, q_stride_t, q_stride_h, stride_page, stride_head, stride_slot,
                         num_q_heads, splits, PAGE: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr,
                         DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
                         JOINS: tl.constexpr):
    request = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    first_page = tl.load(kv_indptr_ptr + request)
    length = (tl.load(kv_indptr_ptr + request + 1) - first_page - 1) * PAGE + tl.load(last_page_len_ptr + request)
    blocks = tl.cdiv(tl.cdiv(length, BLOCK_TOKENS), splits)
    begin = split * blocks * BLOCK_TOKENS
    end = tl.minimum(begin + blocks * BLOCK_TOKENS, length)

    group = tl.arange(0, BLOCK_GROUP)
    dim = tl.arange(0, BLOCK_DIM)
    heads = kv_head * GROUP + group
    in_group = group < GROUP
    in_dim = dim < DIM
    q = tl.load(q_ptr + request * q_stride_t + heads[:, None] * q_stride_h + dim[None, :],
                in_group[:, None] & in_dim[None, :], other=0.0)
    top = tl.full((BLOCK_GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_GROUP,), tl.float32)
    acc = tl.zeros((BLOCK_GROUP, BLOCK_DIM), tl.float32)
    for start in range(begin, end, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        present = token < end
        page = tl.load(kv_indices_ptr + first_page + token // PAGE, present, other=0).to(tl.int64)
        slot = page * stride_page + kv_head * stride_head + (token % PAGE) * stride_slot
        address = slot[:, None] + dim[None, :]
        inside = present[:, None] & in_dim[None, :]
        k = tl.load(k_pages_ptr + address, inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(present[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        v = tl.load(v_pages_ptr + address, inside, other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    # A split beyond a short request's end holds nothing: weight 0 in the join, and no 0 / 0.
    empty = total == 0.0
    row = (request * num_q_heads + heads) * splits + split
    if JOINS:
        tl.store(lse_ptr + row, tl.where(empty, float("-inf"), top + tl.log2(total)), in_group)
    out = (acc / tl.where(empty, 1.0, total)[:, None]).to(part_ptr.dtype.element_ty)
    tl.store(part_ptr + row[:, None] * DIM + dim[None, :], out, in_group[:, None] & in_dim[None, :])


def paged_decode(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, kv_indptr: torch.Tensor,
                 kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor, scale: float, splits: int) -> torch.Tensor:
    """``softmax(q k^T * scale) v`` of each request over all its tokens: ``[B, Hq, D]``.

    ``q`` [B, Hq, D], contiguous in D; ``k_pages`` and ``v_pages`` one layer of the pool with equal strides
    [pages, Hkv, page_size, D]; the page table in FlashInfer's form (int32). Query heads
    ``[h * Hq / Hkv, (h + 1) * Hq / Hkv)`` share KV head h.
    """
    if not runs_triton(q):
        rows = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        return reference.paged_attention(q, k_pages, v_pages, rows, kv_indptr, kv_indices, kv_last_page_len, scale)
    requests, num_q_heads, dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group = num_q_heads // num_kv_heads
    joins = splits > 1
    out = torch.empty((requests, num_q_heads, dim), dtype=q.dtype, device=q.device)
    parts = lses = out
    if joins:
        parts = torch.empty((requests, num_q_heads, splits, dim), dtype=torch.float32, device=q.device)
        lses = torch.empty((requests, num_q_heads, splits), dtype=torch.float32, device=q.device)
    block_dim = max(16, triton.next_power_of_2(dim))
    _paged_decode_kernel[(requests, num_kv_heads, splits)](
        q, k_pages, v_pages, parts, lses, kv_indptr, kv_indices, kv_last_page_len, scale * 1.4426950408889634,
        q.stride(0), q.stride(1), k_pages.stride(0), k_pages.stride(1), k_pages.stride(2), num_q_heads, splits,
        PAGE=page_size, GROUP=group, BLOCK_GROUP=max(16, triton.next_power_of_2(group)), DIM=dim, BLOCK_DIM=block_dim,
        BLOCK_TOKENS=_BLOCK_TOKENS, JOINS=joins, num_warps=4, num_stages=3)
    if joins:
        join_splits(parts, lses, out)
    return out
