"""Causal multi-head latent attention of ragged query rows over keys and values that were made from latents.

Prompts are computed in the expanded form: a head's keys and values are made from the latents first (one matrix
product), which costs a third of the absorbed form's arithmetic. Expanded keys and values are many times larger than
latents, so that a long context is computed in *segments* of bounded size: results of a segment are merged into those of
earlier segments by their log-sum-exps.
"""

from __future__ import annotations

import numpy as np
import torch

from .. import reference
from .._triton import runs_triton, tl, triton
from ..arguments import Segment
from ..tuning.policy import policy_of

BLOCK_ROWS = 128


@triton.jit
def _add_tokens(q, qr, acc, top, total, begin, end, visible, kv_ptr, k_ptr, kv_stride_s, k_stride_s, scale_log2,
                MASKED: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, BLOCK_NOPE: tl.constexpr,
                BLOCK_ROPE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    """Add the segment's tokens ``[begin, end)`` to the running softmax; row r sees those below ``visible[r]``."""
    nope = tl.arange(0, BLOCK_NOPE)
    rope = tl.arange(0, BLOCK_ROPE)
    dim = tl.arange(0, BLOCK_V)
    for start in range(begin, end, BLOCK_TOKENS):
        token = start + tl.arange(0, BLOCK_TOKENS)
        present = (token < end)[:, None]
        at = token.to(tl.int64)[:, None]
        k = tl.load(kv_ptr + at * kv_stride_s + nope[None, :], present & (nope < NOPE)[None, :], other=0.0)
        kr = tl.load(k_ptr + at * k_stride_s + rope[None, :], present & (rope < ROPE)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores += tl.dot(qr, tl.trans(kr), input_precision="ieee")
        scores *= scale_log2
        if MASKED:
            scores = tl.where((token[None, :] < visible[:, None]) & (token < end)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row may see nothing of a segment: without this it would subtract infinities.
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - level[:, None])
        shrink = tl.exp2(top - level)
        v = tl.load(kv_ptr + at * kv_stride_s + NOPE + dim[None, :], present & (dim < V)[None, :], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        top = new_top
    return acc, top, total


# Both begin at any address of what plan_mla_prefill sends: specialized on alignment, the kernel would compile four
# times, while requests wait.
@triton.jit(do_not_specialize_on_alignment=["block_request_ptr", "block_row_ptr"])
def _mla_prefill_kernel(q_ptr, kv_ptr, k_ptr, out_ptr, lse_ptr, table_ptr, block_request_ptr, block_row_ptr,
                        qo_indptr_ptr, scale_log2, q_stride_t, q_stride_h, kv_stride_s, kv_stride_h, k_stride_s,
                        num_heads, MERGES: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr,
                        BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_V: tl.constexpr,
                        BLOCK_ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr):
    block = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.load(block_request_ptr + block)
    first_row = tl.load(block_row_ptr + block)
    first_token = tl.load(qo_indptr_ptr + request)
    count = tl.load(qo_indptr_ptr + request + 1) - first_token
    first_key = tl.load(table_ptr + request * 3)  # index of the request's first token among the segment's
    size = tl.load(table_ptr + request * 3 + 1)
    own = tl.load(table_ptr + request * 3 + 2)  # position of the first row's own token in the segment

    row = first_row + tl.arange(0, BLOCK_ROWS)
    real = row < count
    token = (first_token + row).to(tl.int64)
    nope = tl.arange(0, BLOCK_NOPE)
    rope = tl.arange(0, BLOCK_ROPE)
    dim = tl.arange(0, BLOCK_V)
    q_ptr += head * q_stride_h
    q = tl.load(q_ptr + token[:, None] * q_stride_t + nope[None, :], real[:, None] & (nope < NOPE)[None, :], other=0.0)
    qr = tl.load(q_ptr + token[:, None] * q_stride_t + NOPE + rope[None, :],
                 real[:, None] & (rope < ROPE)[None, :], other=0.0)
    visible = own + tl.minimum(row, count - 1) + 1
    seen_by_all = tl.minimum(tl.maximum(own + first_row + 1, 0), size) // BLOCK_TOKENS * BLOCK_TOKENS
    seen_by_last = tl.minimum(own + tl.minimum(first_row + BLOCK_ROWS, count), size)

    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_ROWS, BLOCK_V), tl.float32)
    kv_ptr += first_key.to(tl.int64) * kv_stride_s + head * kv_stride_h
    k_ptr += first_key.to(tl.int64) * k_stride_s
    acc, top, total = _add_tokens(q, qr, acc, top, total, 0, seen_by_all, visible, kv_ptr, k_ptr, kv_stride_s,
                                  k_stride_s, scale_log2, False, NOPE, ROPE, V, BLOCK_NOPE, BLOCK_ROPE, BLOCK_V,
                                  BLOCK_TOKENS)
    acc, top, total = _add_tokens(q, qr, acc, top, total, seen_by_all, seen_by_last, visible, kv_ptr, k_ptr,
                                  kv_stride_s, k_stride_s, scale_log2, True, NOPE, ROPE, V, BLOCK_NOPE, BLOCK_ROPE,
                                  BLOCK_V, BLOCK_TOKENS)
    at = token * num_heads + head
    target = out_ptr + at[:, None] * V + dim[None, :]
    inside = real[:, None] & (dim < V)[None, :]
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if MERGES:
        lse = tl.where(total == 0.0, float("-inf"), top + tl.log2(total))
        earlier = tl.load(lse_ptr + at, real, other=0.0)
        level = tl.maximum(lse, earlier)
        mine = tl.exp2(lse - level)
        theirs = tl.exp2(earlier - level)
        result = result * mine[:, None] + tl.load(target, inside, other=0.0) * theirs[:, None]
        result = result / (mine + theirs)[:, None]
        tl.store(lse_ptr + at, level + tl.log2(mine + theirs), real)
    tl.store(target, result.to(out_ptr.dtype.element_ty), inside)


def plan_mla_prefill(qo_indptr: np.ndarray, kv_indptr: np.ndarray, kv_last_page_len: np.ndarray, page_size: int,
                     most_tokens: int, device: torch.device) -> list[Segment]:
    """Cut the contexts of a batch (host arrays in FlashInfer's form) into segments of at most ``most_tokens`` tokens,
    at least a page each. A request's segments are in order."""
    pages, step = int(kv_indptr[-1]), max(1, most_tokens // page_size)
    return [_segment(first, min(first + step, pages), np.diff(qo_indptr), kv_indptr, kv_last_page_len, page_size,
                     device)
            for first in range(0, pages, step)]


def _segment(first_page: int, last_page: int, counts: np.ndarray, kv_indptr: np.ndarray, kv_last_page_len: np.ndarray,
             page_size: int, device: torch.device) -> Segment:
    lengths = (np.diff(kv_indptr) - 1) * page_size + kv_last_page_len
    begin = np.clip(kv_indptr[:-1], first_page, last_page)
    end = np.clip(kv_indptr[1:], first_page, last_page)
    skipped = (begin - kv_indptr[:-1]) * page_size
    sizes = np.maximum(np.minimum((end - begin) * page_size, lengths - skipped), 0)
    own = lengths - counts - skipped
    table = np.stack(((begin - first_page) * page_size, sizes, own), axis=1)
    blocks = np.where(sizes > 0, -(-counts // BLOCK_ROWS), 0)
    request = np.repeat(np.arange(len(counts)), blocks)
    row = (np.arange(len(request)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * BLOCK_ROWS
    # Blocks whose last row precedes the segment see nothing of it.
    sees = own[request] + np.minimum(row + BLOCK_ROWS, counts[request]) > 0
    request, row = request[sees], row[sees]
    order = np.argsort(-row, kind="stable")  # later, longer blocks of a prompt start first
    packed = np.concatenate((table.reshape(-1), request[order], row[order])).astype(np.int32)
    sent = torch.from_numpy(packed)
    if device.type == "cuda":
        sent = sent.pin_memory().to(device, non_blocking=True)
    parts = sent.split([table.size, len(request), len(request)])
    return Segment(first_page, last_page, parts[0].view(-1, 3), parts[1], parts[2])


def mla_prefill(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, segment: Segment, qo_indptr: torch.Tensor,
                scale: float, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Attention of the batch's rows to one segment, into ``out`` [T, H, V].

    ``q`` [T, H, N + R] with rope applied; ``kv`` [S, H, N + V] the segment's keys and values, ``k_rope`` [S, R] its
    shared keys; all views contiguous in their last dimension. With ``lse`` [T, H] float32 (base 2) the result is merged
    with that of earlier segments, whose ``out`` is float32: both start as minus infinity and zeros, and both are
    updated.
    Without ``lse``, the segment has all tokens that its rows see, and every row is written.
    """
    if not runs_triton(q):
        reference.mla_prefill(q, kv, k_rope, segment, qo_indptr, scale, out, lse)
        return
    heads, width = kv.shape[1:]
    rope, v = k_rope.shape[1], out.shape[2]
    nope = width - v
    tile = policy_of(q.device).attention.mla_prefill(q.element_size())
    _mla_prefill_kernel[(segment.block_request.shape[0], heads)](
        q, kv, k_rope, out, out if lse is None else lse, segment.table, segment.block_request, segment.block_row,
        qo_indptr, scale * 1.4426950408889634, q.stride(0), q.stride(1), kv.stride(0), kv.stride(1), k_rope.stride(0),
        heads, MERGES=lse is not None, NOPE=nope, ROPE=rope, V=v, BLOCK_NOPE=max(16, triton.next_power_of_2(nope)),
        BLOCK_ROPE=max(16, triton.next_power_of_2(rope)), BLOCK_V=max(16, triton.next_power_of_2(v)),
        BLOCK_ROWS=BLOCK_ROWS, BLOCK_TOKENS=tile.tokens, num_warps=tile.warps, num_stages=tile.stages)
