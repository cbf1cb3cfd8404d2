"""Attention of one query row a request over its pages, cut along the sequence into pieces.

A decode step has few programs (requests x KV heads) with long loops: cutting the keys into pieces of about equal length
fills the GPU whatever the lengths, and a second, small kernel joins a request's pieces by their log-sum-exps
(Flash-Decoding, Dao et al., 2023). A request of one piece needs no join: the first kernel writes its result.

All query heads of a KV head are rows of one tile, padded to the 16 that a matrix product takes: keys are read once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import reference
from ._triton import runs_triton, tl, triton
from .decode_plan import DecodePlan, span_of
from .join_pieces import join_pieces


class Tile(NamedTuple):
    """Tokens that one turn of the loop takes, and how the compiler is to run it."""

    tokens: int = 64
    warps: int = 4
    stages: int = 3


TILE = Tile()


# Without ``do_not_specialize`` a batch of the first size that is a multiple of 16 would compile anew: a second's pause
# for every running request.
@triton.jit(do_not_specialize=["requests"])
def _paged_decode_kernel(q_ptr, k_pages_ptr, v_pages_ptr, out_ptr, part_ptr, lse_ptr, kv_indptr_ptr, kv_indices_ptr,
                         last_page_len_ptr, owners_ptr, firsts_ptr, requests, scale_log2, v_scale, q_stride_t,
                         q_stride_h, stride_page, stride_head, stride_slot, num_q_heads, PAGE: tl.constexpr,
                         GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
                         BLOCK_TOKENS: tl.constexpr):
    piece = tl.program_id(0)
    kv_head = tl.program_id(1)
    if piece >= tl.load(firsts_ptr + requests):
        return
    request, pieces, first_page, begin, end = span_of(piece, owners_ptr, firsts_ptr, kv_indptr_ptr, last_page_len_ptr,
                                                      PAGE, BLOCK_TOKENS)

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
        k = tl.load(k_pages_ptr + address, inside, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(present[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        v = tl.load(v_pages_ptr + address, inside, other=0.0).to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    # A piece has at least one token: as many pieces as tiles at most, for no piece is shorter than a tile on average.
    result = acc / total[:, None] * v_scale
    kept = in_group[:, None] & in_dim[None, :]
    if pieces == 1:
        row = request * num_q_heads + heads
        tl.store(out_ptr + row[:, None] * DIM + dim[None, :], result.to(out_ptr.dtype.element_ty), kept)
    else:
        row = piece.to(tl.int64) * num_q_heads + heads
        tl.store(lse_ptr + row, top + tl.log2(total), in_group)
        tl.store(part_ptr + row[:, None] * DIM + dim[None, :], result, kept)


def paged_decode(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, kv_indptr: torch.Tensor,
                 kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor, scale: float, plan: DecodePlan,
                 tile: Tile = TILE, v_scale: float = 1.0) -> torch.Tensor:
    """``softmax(q k^T * scale) v * v_scale`` of each request over all its tokens: ``[B, Hq, D]``.

    ``q`` [B, Hq, D], contiguous in D; ``k_pages`` and ``v_pages`` one layer of the pool with equal strides
    [pages, Hkv, page_size, D]; the page table in FlashInfer's form (int32). Query heads
    ``[h * Hq / Hkv, (h + 1) * Hq / Hkv)`` share KV head h. Pages may be of another type than ``q``. ``plan`` is of
    the same page table, and its pieces are no shorter than ``tile.tokens``.
    """
    if not runs_triton(q):
        rows = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        return reference.paged_attention(q, k_pages, v_pages, rows, kv_indptr, kv_indices, kv_last_page_len, scale,
                                         v_scale)
    requests, num_q_heads, dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group = num_q_heads // num_kv_heads
    out = torch.empty((requests, num_q_heads, dim), dtype=q.dtype, device=q.device)
    parts = lses = out
    most = requests
    if plan.joins:
        most = len(plan.owners)
        parts = torch.empty((most, num_q_heads, dim), dtype=torch.float32, device=q.device)
        lses = torch.empty((most, num_q_heads), dtype=torch.float32, device=q.device)
    block_dim = max(16, triton.next_power_of_2(dim))
    _paged_decode_kernel[(most, num_kv_heads)](
        q, k_pages, v_pages, out, parts, lses, kv_indptr, kv_indices, kv_last_page_len, plan.owners, plan.firsts,
        requests, scale * 1.4426950408889634, v_scale, q.stride(0), q.stride(1), k_pages.stride(0), k_pages.stride(1),
        k_pages.stride(2), num_q_heads, PAGE=page_size, GROUP=group,
        BLOCK_GROUP=max(16, triton.next_power_of_2(group)), DIM=dim, BLOCK_DIM=block_dim, BLOCK_TOKENS=tile.tokens,
        num_warps=tile.warps, num_stages=tile.stages)
    if plan.joins:
        join_pieces(parts, lses, out, plan)
    return out
