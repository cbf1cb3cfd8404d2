"""Attention of one query row a request over selected tokens of its pages, for each query head its own."""

from __future__ import annotations

import torch

from .. import reference
from .._triton import runs_triton, tl, triton

_TILE_TOKENS = 64
_WARPS = 2
"""Few: a warp's own sums need no other's. 64 requests of 32 heads and 256 tokens took an H200 91 us with 32 tokens and
2 warps, 131 us with 4 warps, 96 us with 128 tokens and 4 warps, 163 us with 8."""


@triton.jit
def _sparse_decode_kernel(q_ptr, k_pages_ptr, v_pages_ptr, out_ptr, kv_indptr_ptr, kv_indices_ptr, selected_ptr,
                          lengths_ptr, scale_log2, v_scale, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
                          stride_page, stride_head, stride_slot, num_q_heads, PAGE: tl.constexpr, GROUP: tl.constexpr,
                          COUNT: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    if tl.load(lengths_ptr + request) == 0:
        return
    dim = tl.arange(0, BLOCK_DIM)
    in_dim = dim < DIM
    offset = tl.arange(0, BLOCK_TOKENS)
    selected = selected_ptr + (request * num_q_heads + head) * COUNT
    pages = kv_indices_ptr + tl.load(kv_indptr_ptr + request)
    q = tl.load(q_ptr + request * q_stride_t + head * q_stride_h + dim, in_dim, other=0.0).to(tl.float32)
    top = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    acc = tl.zeros((BLOCK_DIM,), tl.float32)
    for start in range(0, COUNT, BLOCK_TOKENS):
        place = start + offset
        token = tl.load(selected + place, place < COUNT, other=-1)
        present = token >= 0
        page = tl.load(pages + token // PAGE, present, other=0).to(tl.int64)
        slot = page * stride_page + (head // GROUP) * stride_head + (token % PAGE) * stride_slot
        address = slot[:, None] + dim[None, :]
        inside = present[:, None] & in_dim[None, :]
        k = tl.load(k_pages_ptr + address, inside, other=0.0).to(tl.float32)
        v = tl.load(v_pages_ptr + address, inside, other=0.0).to(tl.float32)
        scores = tl.where(present, tl.sum(k * q[None, :], 1) * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))  # finite: a request's first selected token is in the first tile
        weights = tl.exp2(scores - new_top)
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink + tl.sum(v * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    out = out_ptr + request * out_stride_t + head * out_stride_h + dim
    tl.store(out, (acc / total * v_scale).to(out_ptr.dtype.element_ty), in_dim)


def sparse_decode(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, kv_indptr: torch.Tensor,
                  kv_indices: torch.Tensor, selected: torch.Tensor, lengths: torch.Tensor, scale: float,
                  v_scale: float, out: torch.Tensor) -> None:
    """Writes ``softmax(q k^T * scale) v * v_scale`` over the ``selected`` [B, Hq, count] int32 tokens to ``out``
    [B, Hq, D], for the requests with ``lengths`` [B] int32 of SparseDecodePlan; other rows stay as they are.

    ``q`` [B, Hq, D], contiguous in D, as ``out``; ``k_pages`` and ``v_pages`` one layer of the pool with equal strides
    [pages, Hkv, page_size, D], of any type; the page table in FlashInfer's form (int32). Negative tokens are none.
    """
    if not runs_triton(q):
        reference.sparse_decode(q, k_pages, v_pages, kv_indptr, kv_indices, selected, lengths, scale, v_scale, out)
        return
    requests, num_q_heads, dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    _sparse_decode_kernel[(num_q_heads, requests)](  # heads of a group, side by side, share keys in the L2 cache

        q, k_pages, v_pages, out, kv_indptr, kv_indices, selected, lengths, scale * 1.4426950408889634, v_scale,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), k_pages.stride(0), k_pages.stride(1),
        k_pages.stride(2), num_q_heads, PAGE=page_size, GROUP=num_q_heads // num_kv_heads, COUNT=selected.shape[2],
        DIM=dim, BLOCK_DIM=max(16, triton.next_power_of_2(dim)), BLOCK_TOKENS=_TILE_TOKENS,
        num_warps=_WARPS)
