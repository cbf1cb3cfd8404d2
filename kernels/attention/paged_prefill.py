"""Causal attention of ragged query rows over their pages: FlashAttention's online softmax, gathering pages.

The query heads that share a KV head are packed with the tokens into one block of rows, so that a short extend of a
grouped model still fills the tensor cores and every key is loaded once for the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .. import reference
from .._triton import runs_triton, tl, triton
from ..tuning.policy import policy_of
from .soft_cap import soft_cap

BLOCK_ROWS = 128


@triton.jit
def _add_tokens(q, acc, top, total, begin, end, visible, k_pages_ptr, v_pages_ptr, kv_indices_ptr, first_page,
                stride_page, stride_slot, scale_log2, MASKED: tl.constexpr, PAGE: tl.constexpr, DIM: tl.constexpr,
                BLOCK_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr):
    """Add tokens ``[begin, end)`` to the running softmax; row r sees those below ``visible[r]``, with ``WINDOW`` only
    the last ``WINDOW`` of them."""
    dim = tl.arange(0, BLOCK_DIM)
    for start in range(begin, end, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        present = token < end
        page = tl.load(kv_indices_ptr + first_page + token // PAGE, present, other=0).to(tl.int64)
        address = (page * stride_page + (token % PAGE) * stride_slot)[:, None] + dim[None, :]
        inside = present[:, None] & (dim < DIM)[None, :]
        k = tl.load(k_pages_ptr + address, inside, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        if CAP > 0.0:
            scores = soft_cap(scores, CAP)
        if MASKED:
            scores = tl.where((token[None, :] < visible[:, None]) & present[None, :], scores, float("-inf"))
        if MASKED and WINDOW:
            scores = tl.where(token[None, :] >= visible[:, None] - WINDOW, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        level = new_top
        if MASKED and WINDOW:  # a row may not have seen a key yet: less its top, minus infinity would be NaN
            level = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(top - level)
        v = tl.load(v_pages_ptr + address, inside, other=0.0).to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    return acc, top, total


# The row of ``row`` in plan_prefill's table is aligned for a quarter of the batches: the others would recompile.
@triton.jit(do_not_specialize_on_alignment=["block_row_ptr"])
def _paged_prefill_kernel(q_ptr, k_pages_ptr, v_pages_ptr, sinks_ptr, out_ptr, block_request_ptr, block_row_ptr,
                          qo_indptr_ptr, kv_indptr_ptr, kv_indices_ptr, last_page_len_ptr, scale_log2, v_scale,
                          q_stride_t, q_stride_h, out_stride_t, stride_page, stride_head, stride_slot,
                          PAGE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
                          BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, WINDOW: tl.constexpr,
                          SINKS: tl.constexpr, CAP: tl.constexpr):
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.load(block_request_ptr + block)
    first_row = tl.load(block_row_ptr + block)
    first_token = tl.load(qo_indptr_ptr + request)
    count = tl.load(qo_indptr_ptr + request + 1) - first_token
    first_page = tl.load(kv_indptr_ptr + request)
    length = (tl.load(kv_indptr_ptr + request + 1) - first_page - 1) * PAGE + tl.load(last_page_len_ptr + request)

    row = first_row + tl.arange(0, BLOCK_ROWS)
    dim = tl.arange(0, BLOCK_DIM)
    token = row // GROUP
    inside = (token < count)[:, None] & (dim < DIM)[None, :]
    head = kv_head * GROUP + row % GROUP
    query_row = (first_token + token).to(tl.int64)
    q = tl.load(q_ptr + (query_row * q_stride_t + head * q_stride_h)[:, None] + dim[None, :], inside, other=0.0)
    # Rows after the request's last see what that one sees, so that no row is without a key (0 / 0).
    visible = length - count + tl.minimum(token, count - 1) + 1
    seen_by_all = (length - count + first_row // GROUP + 1) // BLOCK_TOKENS * BLOCK_TOKENS
    seen_by_last = length - count + tl.minimum((first_row + BLOCK_ROWS - 1) // GROUP, count - 1) + 1

    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_DIM), tl.float32)
    if SINKS:  # as a key whose value is zero
        top = tl.load(sinks_ptr + head) * 1.4426950408889634
        total += 1.0
    k_pages_ptr += kv_head * stride_head
    v_pages_ptr += kv_head * stride_head
    begin = 0
    if WINDOW:
        # From the first that any row sees, to the first tile that all of them see whole; and never behind the tiles
        # that the causal mask leaves whole.
        first_begin = tl.maximum(length - count + first_row // GROUP + 1 - WINDOW, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        last_begin = tl.cdiv(tl.maximum(seen_by_last - WINDOW, 0), BLOCK_TOKENS) * BLOCK_TOKENS
        begin = tl.minimum(last_begin, seen_by_all)
        acc, top, total = _add_tokens(q, acc, top, total, first_begin, begin, visible, k_pages_ptr, v_pages_ptr,
                                  kv_indices_ptr, first_page, stride_page, stride_slot, scale_log2, True, PAGE, DIM,
                                  BLOCK_DIM, BLOCK_TOKENS, WINDOW, CAP)
    acc, top, total = _add_tokens(q, acc, top, total, begin, seen_by_all, visible, k_pages_ptr, v_pages_ptr,
                              kv_indices_ptr, first_page, stride_page, stride_slot, scale_log2, False, PAGE, DIM,
                              BLOCK_DIM, BLOCK_TOKENS, WINDOW, CAP)
    acc, top, total = _add_tokens(q, acc, top, total, seen_by_all, seen_by_last, visible, k_pages_ptr, v_pages_ptr,
                              kv_indices_ptr, first_page, stride_page, stride_slot, scale_log2, True, PAGE, DIM,
                              BLOCK_DIM, BLOCK_TOKENS, WINDOW, CAP)
    out = (acc / total[:, None] * v_scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (query_row * out_stride_t + head * DIM)[:, None] + dim[None, :], out, inside)


@dataclass(frozen=True)
class PrefillBlocks:
    """The rows of each program: block i starts at packed row ``row[i]`` of request ``request[i]`` (int32)."""

    request: torch.Tensor
    row: torch.Tensor


def plan_prefill(qo_indptr: np.ndarray, group: int, device: torch.device) -> PrefillBlocks:
    """Cut each request's ``tokens * group`` packed rows into blocks; later, longer blocks of a prompt start first."""
    blocks = -(-np.diff(qo_indptr) * group // BLOCK_ROWS)
    request = np.repeat(np.arange(len(blocks)), blocks)
    row = (np.arange(len(request)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * BLOCK_ROWS
    order = np.argsort(-row, kind="stable")
    table = torch.from_numpy(np.stack((request[order], row[order])).astype(np.int32))
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return PrefillBlocks(table[0], table[1])


def paged_prefill(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, blocks: PrefillBlocks,
                  qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
                  kv_last_page_len: torch.Tensor, scale: float, v_scale: float = 1.0, window: int | None = None,
                  sinks: torch.Tensor | None = None, softcap: float = 0.0) -> torch.Tensor:
    """``softmax(q k^T * scale) v * v_scale``, where request b's rows are the last of its sequence: ``[T, Hq, D]``.

    ``q`` [T, Hq, D], contiguous in D; request b owns rows ``qo_indptr[b]:qo_indptr[b+1]``; ``k_pages`` and
    ``v_pages`` one layer of the pool with equal strides [pages, Hkv, page_size, D]; the page table in FlashInfer's
    form (int32). Query heads ``[h * Hq / Hkv, (h + 1) * Hq / Hkv)`` share KV head h. Pages may be of another type than
    ``q``. With ``window`` a row sees the last ``window`` tokens up to its own. ``sinks`` [Hq] float32 are logits that
    join each head's softmax without a value. A ``softcap`` c makes scores ``c * tanh(scores / c)``.
    """
    if not runs_triton(q):
        return reference.paged_attention(q, k_pages, v_pages, qo_indptr, kv_indptr, kv_indices, kv_last_page_len,
                                         scale, v_scale, window, sinks, softcap=softcap)
    tokens, num_q_heads, dim = q.shape
    num_kv_heads, page_size = k_pages.shape[1:3]
    out = torch.empty((tokens, num_q_heads, dim), dtype=q.dtype, device=q.device)
    block_dim = max(16, triton.next_power_of_2(dim))
    tile = policy_of(q.device).attention.prefill(block_dim * q.element_size(), q.element_size())
    _paged_prefill_kernel[(blocks.request.shape[0], num_kv_heads)](
        q, k_pages, v_pages, sinks, out, blocks.request, blocks.row, qo_indptr, kv_indptr, kv_indices,
        kv_last_page_len, scale * 1.4426950408889634, v_scale, q.stride(0), q.stride(1), out.stride(0),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2), PAGE=page_size, GROUP=num_q_heads // num_kv_heads,
        DIM=dim, BLOCK_DIM=block_dim, BLOCK_ROWS=BLOCK_ROWS, BLOCK_TOKENS=tile.tokens,
        WINDOW=window or 0, SINKS=sinks is not None, CAP=softcap, num_warps=tile.warps, num_stages=tile.stages)
    return out
