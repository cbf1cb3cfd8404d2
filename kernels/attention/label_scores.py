"""Approximate attention scores of all tokens, from the first channels of queries and keys.

With channels in the order of order_channels.py these are the heavy ones of "Post-Training Sparse Attention with Double
Sparsity" (Yang et al., arXiv:2408.07092): its label cache is the beginning of every key.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import runs_triton, tl, triton
from .decode_plan import DecodePlan, split_range
from .sparse_decode_plan import SCORE_BLOCK, SparseDecodePlan, TokenScores

_TILE_TOKENS = 128


@triton.jit(do_not_specialize=["requests"])
def _label_scores_kernel(q_ptr, k_pages_ptr, scores_ptr, maxima_ptr, lengths_ptr, score_indptr_ptr, kv_indptr_ptr,
                         kv_indices_ptr, last_page_len_ptr, request_of_split_ptr, split_indptr_ptr, requests, scale,
                         score_stride_h, maxima_stride_h, q_stride_t, q_stride_h, stride_page, stride_head, stride_slot,
                         PAGE: tl.constexpr, GROUP: tl.constexpr, BLOCK_GROUP: tl.constexpr, CHANNELS: tl.constexpr,
                         BLOCK_CHANNELS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, SCORE_BLOCK: tl.constexpr,
                         HALF: tl.constexpr):
    kv_head = tl.program_id(0)
    split = tl.program_id(1)
    if split >= tl.load(split_indptr_ptr + requests):
        return
    request, _, first_page, begin, end = split_range(split, request_of_split_ptr, split_indptr_ptr, kv_indptr_ptr,
                                                     last_page_len_ptr, PAGE, BLOCK_TOKENS)
    if tl.load(lengths_ptr + request) == 0:
        return
    first_block = tl.load(score_indptr_ptr + request) // SCORE_BLOCK
    channel = tl.arange(0, BLOCK_CHANNELS)
    offset = tl.arange(0, BLOCK_TOKENS)
    group = tl.arange(0, BLOCK_GROUP)
    heads = kv_head * GROUP + group
    in_group = group < GROUP
    in_label = channel < CHANNELS
    page = tl.load(kv_indices_ptr + first_page + (begin + offset) // PAGE, begin + offset < end, other=0)
    q = tl.load(q_ptr + request * q_stride_t + heads[None, :] * q_stride_h + channel[:, None],
                in_group[None, :] & in_label[:, None], other=0.0)
    if HALF:
        q = q.to(tl.float16)
    out = scores_ptr + heads[:, None].to(tl.int64) * score_stride_h + first_block * SCORE_BLOCK
    block = tl.arange(0, BLOCK_TOKENS // SCORE_BLOCK)
    maxima_out = maxima_ptr + heads[None, :].to(tl.int64) * maxima_stride_h + first_block
    room_end = tl.cdiv(end, SCORE_BLOCK) * SCORE_BLOCK
    for start in range(begin, end, BLOCK_TOKENS):
        token = start + offset
        present = token < end
        slot = page.to(tl.int64) * stride_page + kv_head * stride_head + (token % PAGE) * stride_slot
        # The next iteration's: loads of keys that wait for page ids in their own iteration are never pipelined.
        page = tl.load(kv_indices_ptr + first_page + (token + BLOCK_TOKENS) // PAGE, token + BLOCK_TOKENS < end,
                       other=0)
        k = tl.load(k_pages_ptr + slot[:, None] + channel[None, :], present[:, None] & in_label[None, :],
                    other=0.0).to(q.dtype)
        # Tokens are the rows: heads would leave most of 16 empty. A block's tokens are those of one warp.
        scores = tl.dot(k, q, input_precision="ieee") * scale
        scores = tl.minimum(tl.maximum(scores, -60000.0), 60000.0)  # the largest float16 is a little above
        scores = tl.where(present[:, None], scores, float("-inf")).to(tl.float16)
        blocks = tl.reshape(scores, (BLOCK_TOKENS // SCORE_BLOCK, SCORE_BLOCK, BLOCK_GROUP))
        tl.store(maxima_out + (start // SCORE_BLOCK + block)[:, None], tl.max(blocks, 1),
                 in_group[None, :] & (start + block * SCORE_BLOCK < end)[:, None])
        # Whole blocks: a mask that ends anywhere would make each store one of 2 bytes.
        tl.store(out + token[None, :], tl.trans(scores), in_group[:, None] & (token < room_end)[None, :])


def label_scores(q: torch.Tensor, k_pages: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
                 num_channels: int, scale: float, sparse: SparseDecodePlan, plan: DecodePlan,
                 scores: TokenScores) -> None:
    """Writes ``q k^T * scale`` of the first ``num_channels`` channels to ``scores`` of Hq heads, request by request at
    ``sparse.score_indptr``, and their blocks' maxima. Minus infinity fills up each request's last block.

    ``q`` [B, Hq, D], contiguous in D; ``k_pages`` [pages, Hkv, page_size, D] one layer of the pool; the page table in
    FlashInfer's form (int32) with ``sparse.sparse``, by which ``plan`` was made; its splits have 128 tokens at least.
    """
    if not runs_triton(q):
        reference.label_scores(q, k_pages, kv_indptr, kv_indices, num_channels, scale, sparse.lengths,
                               sparse.score_indptr, *scores)
        return
    requests, num_q_heads, _ = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    group = num_q_heads // num_kv_heads
    _label_scores_kernel[(num_kv_heads, len(plan.request_of_split))](
        q, k_pages, *scores, sparse.lengths, sparse.score_indptr, kv_indptr, kv_indices, sparse.sparse,
        plan.request_of_split, plan.split_indptr, requests, scale, scores.values.stride(0), scores.maxima.stride(0),
        q.stride(0), q.stride(1), k_pages.stride(0), k_pages.stride(1), k_pages.stride(2), PAGE=page_size, GROUP=group,
        BLOCK_GROUP=max(8, triton.next_power_of_2(group)), CHANNELS=num_channels,
        BLOCK_CHANNELS=max(16, triton.next_power_of_2(num_channels)), BLOCK_TOKENS=_TILE_TOKENS,
        SCORE_BLOCK=SCORE_BLOCK, HALF=q.element_size() == 2 and k_pages.element_size() == 1, num_warps=4,
        num_stages=3)
