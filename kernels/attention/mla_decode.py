"""Multi-head latent attention of one query row a request over its pages of latents, split along the sequence.

In the absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1.2) every query head is compared with the latents
themselves, and its result is a mean of latents: one shared vector of a token is key and value of all heads. A program
takes a block of heads, and loads each latent once for both products. Splits are those of paged_decode.py.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..tuning.attention import DecodeTile
from ..tuning.policy import policy_of
from .decode_plan import DecodePlan, split_range
from .merge_splits import merge_splits
from .mla_decode_narrow import _mla_decode_narrow_kernel


@triton.jit(do_not_specialize=["requests"])
def _mla_decode_kernel(q_ptr, qr_ptr, pages_ptr, out_ptr, part_ptr, lse_ptr, kv_indptr_ptr,
                       kv_indices_ptr, last_page_len_ptr, request_of_split_ptr, split_indptr_ptr, requests, scale_log2,
                       page_scale, q_stride_t, q_stride_h, qr_stride_t, qr_stride_h, stride_page, stride_slot,
                       num_heads,
                       PAGE: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr,
                       BLOCK_ROPE: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
                       PDL: tl.constexpr):
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
    real = (heads < num_heads)[:, None]
    q = tl.load(q_ptr + request * q_stride_t + heads[:, None] * q_stride_h + dim[None, :],
                real & (dim < RANK)[None, :], other=0.0)
    qr = tl.load(qr_ptr + request * qr_stride_t + heads[:, None] * qr_stride_h + rope[None, :],
                 real & (rope < ROPE)[None, :], other=0.0)
    top = tl.full((BLOCK_HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_HEADS,), tl.float32)
    acc = tl.zeros((BLOCK_HEADS, BLOCK_RANK), tl.float32)
    for start in range(begin, end, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        present = token < end
        page = tl.load(kv_indices_ptr + first_page + token // PAGE, present, other=0).to(tl.int64)
        slot = page * stride_page + (token % PAGE) * stride_slot
        latent = tl.load(pages_ptr + slot[:, None] + dim[None, :], present[:, None] & (dim < RANK)[None, :],
                         other=0.0).to(q.dtype)
        key = tl.load(pages_ptr + slot[:, None] + RANK + rope[None, :], present[:, None] & (rope < ROPE)[None, :],
                      other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores += tl.dot(qr, tl.trans(key), input_precision="ieee")
        scores = tl.where(present[None, :], scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        acc = acc * shrink[:, None] + tl.dot(weights.to(latent.dtype), latent, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    result = acc / total[:, None] * page_scale
    stored = real & (dim < RANK)[None, :]
    if splits == 1:
        row = request * num_heads + heads
        tl.store(out_ptr + row[:, None] * RANK + dim[None, :], result.to(out_ptr.dtype.element_ty), stored)
    else:
        row = split.to(tl.int64) * num_heads + heads
        tl.store(lse_ptr + row, top + tl.log2(total), heads < num_heads)
        tl.store(part_ptr + row[:, None] * RANK + dim[None, :], result, stored)


def mla_decode(q: torch.Tensor, q_rope: torch.Tensor, pages: torch.Tensor, kv_indptr: torch.Tensor,
               kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor, scale: float,
               plan: DecodePlan, tile: DecodeTile | None = None, page_scale: float = 1.0) -> torch.Tensor:
    """``softmax((q l^T + q_rope k^T) * scale) l`` of each request over all its latents l and shared keys k, as
    ``[B, H, L]``.

    ``q`` [B, H, L] and ``q_rope`` [B, H, R], views contiguous in their last dimension; ``pages`` one layer of a pool
    of latents [pages, page_size, L + R]; the page table in FlashInfer's form (int32). ``plan`` is of the same table,
    its splits no shorter than ``tile.tokens`` (by default 32). Pages may be of another type than ``q``, and hold
    latents and keys over ``page_scale``.
    """
    if not runs_triton(q):
        rows = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
        return reference.mla_attention(q, q_rope, pages, rows, kv_indptr, kv_indices, kv_last_page_len, scale,
                                       page_scale)
    requests, num_heads, rank = q.shape
    width = q_rope.shape[2]
    out = torch.empty((requests, num_heads, rank), dtype=q.dtype, device=q.device)
    parts = lses = out
    max_splits = requests
    if plan.needs_merge:
        max_splits = len(plan.request_of_split)
        parts = torch.empty((max_splits, num_heads, rank), dtype=torch.float32, device=q.device)
        lses = torch.empty((max_splits, num_heads), dtype=torch.float32, device=q.device)
    policy = policy_of(q.device).attention
    block_heads = policy.mla_head_block(num_heads, q.element_size())
    tile = tile or policy.mla_decode(num_heads, q.element_size())
    narrow = policy.mla_is_narrow(num_heads, q.element_size())
    kernel = _mla_decode_narrow_kernel if narrow else _mla_decode_kernel
    kernel[(max_splits, triton.cdiv(num_heads, block_heads))](
        q, q_rope, pages, out, parts, lses, kv_indptr, kv_indices, kv_last_page_len,
        plan.request_of_split,
        plan.split_indptr, requests, scale * page_scale * 1.4426950408889634, page_scale, q.stride(0), q.stride(1),
        q_rope.stride(0), q_rope.stride(1), pages.stride(0), pages.stride(1), num_heads, PAGE=pages.shape[1], RANK=rank,
        ROPE=width, BLOCK_RANK=max(16, triton.next_power_of_2(rank)), BLOCK_ROPE=max(16, triton.next_power_of_2(width)),
        BLOCK_HEADS=block_heads, BLOCK_TOKENS=tile.tokens, num_warps=tile.warps,
        num_stages=tile.stages, **pdl(q))
    if plan.needs_merge:
        merge_splits(parts, lses, out, plan)
    return out
