"""Multi-head latent attention of a few query rows a request over its pages of latents: the rows of drafts that one step
verifies.

As in mla_decode.py every head is compared with the latents themselves. A program takes a block of a request's rows with
a block of heads, as the rows of one tile, and loads each latent once for all of them. Blocks, splits and masks are
those of verify_attention.py: lengths are read on the device.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..arguments import RowMask
from ..tuning.attention import VerifyTile
from .row_mask import sees
from .verify_attention import SplitResults, VerifyPlan, block_of_split, merge_rows, rows_of_block, split_results


@triton.jit
def _of_rows(x, TRANSPOSED: tl.constexpr):
    """A value a row of the tile, against the tile's scores."""
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def _of_tokens(x, TRANSPOSED: tl.constexpr):
    """A value a token, against the tile's scores."""
    return x[:, None] if TRANSPOSED else x[None, :]


@triton.jit
def _add_latents(q, qr, acc, top, total, begin, end, visible, word, masked_from, pages_ptr, indices_ptr, stride_page,
                 stride_slot, scale_log2, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr, PAGE: tl.constexpr,
                 RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
                 BLOCK_TOKENS: tl.constexpr):
    """Add tokens ``[begin, end)`` to the running softmax. Row r sees those below ``visible[r]``; if MASKED those below
    ``masked_from``, and those of its ``word``."""
    dim, rope = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    offset = tl.arange(0, BLOCK_TOKENS)
    in_rank, in_rope = (dim < RANK)[None, :], (rope < ROPE)[None, :]
    AXIS: tl.constexpr = 0 if TRANSPOSED else 1
    page = tl.load(indices_ptr + (begin + offset) // PAGE, begin + offset < end, other=0)
    for start in range(begin, end, BLOCK_TOKENS):
        token = start + offset
        present = token < end
        slot = page.to(tl.int64) * stride_page + (token % PAGE) * stride_slot
        # The next iteration's: loads of latents that wait for page ids in their own iteration are never pipelined.
        page = tl.load(indices_ptr + (token + BLOCK_TOKENS) // PAGE, token + BLOCK_TOKENS < end, other=0)
        latent = tl.load(pages_ptr + slot[:, None] + dim[None, :], present[:, None] & in_rank, other=0.0).to(q.dtype)
        key = tl.load(pages_ptr + slot[:, None] + RANK + rope[None, :], present[:, None] & in_rope,
                      other=0.0).to(q.dtype)
        if TRANSPOSED:
            scores = tl.dot(latent, tl.trans(q), input_precision="ieee")
            scores = tl.dot(key, tl.trans(qr), scores, input_precision="ieee") * scale_log2
        else:
            scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
            scores = tl.dot(qr, tl.trans(key), scores, input_precision="ieee") * scale_log2
        if MASKED:  # noqa: SIM102 (one is known to the compiler)
            if start + BLOCK_TOKENS > tl.minimum(masked_from, end):
                seen = sees(_of_rows(word, TRANSPOSED), _of_tokens(token, TRANSPOSED), masked_from)
                scores = tl.where(seen & _of_tokens(present, TRANSPOSED), scores, float("-inf"))
        else:
            scores = tl.where(_of_tokens(token, TRANSPOSED) < _of_rows(visible, TRANSPOSED), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, AXIS))
        # A row may not have seen a latent yet: less its top, minus infinity would be NaN.
        level = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - _of_rows(level, TRANSPOSED))
        shrink = tl.exp2(top - level)
        acc = acc * _of_rows(shrink, TRANSPOSED)
        if TRANSPOSED:
            acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc, input_precision="ieee")
        else:
            acc = tl.dot(weights.to(latent.dtype), latent, acc, input_precision="ieee")
        total = total * shrink + tl.sum(weights, AXIS)
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["blocks"])
def _mla_verify_kernel(q_ptr, qr_ptr, pages_ptr, words_ptr, counts_ptr, out_ptr, part_ptr, lse_ptr, qo_indptr_ptr,
                       kv_indptr_ptr, kv_indices_ptr, last_page_len_ptr, length_indptr_ptr, block_of_split_ptr,
                       split_indptr_ptr, blocks, scale_log2, page_scale, q_stride_t, q_stride_h, qr_stride_t,
                       qr_stride_h, stride_page, stride_slot, num_heads, PAGE: tl.constexpr, ROWS: tl.constexpr,
                       PER_REQUEST: tl.constexpr, HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, RANK: tl.constexpr,
                       ROPE: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_ROPE: tl.constexpr,
                       BLOCK_TOKENS: tl.constexpr, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    split = tl.program_id(1)
    if split >= tl.load(split_indptr_ptr + blocks):
        return
    block, first_split, splits, length = block_of_split(split, block_of_split_ptr, split_indptr_ptr, length_indptr_ptr)
    if length == 0:  # the request has fewer rows
        return
    first_row, first_token, count, first_page, whole = rows_of_block(block, qo_indptr_ptr, kv_indptr_ptr,
                                                                     last_page_len_ptr, PAGE, ROWS, PER_REQUEST)
    tiles = tl.cdiv(length, BLOCK_TOKENS)
    begin = tiles * (split - first_split) // splits * BLOCK_TOKENS
    end = tl.minimum(tiles * (split - first_split + 1) // splits * BLOCK_TOKENS, length)

    row = tl.arange(0, BLOCK_ROWS)
    dim, rope = tl.arange(0, BLOCK_RANK), tl.arange(0, BLOCK_ROPE)
    # Rows after the request's last see what that one sees, and are not stored.
    in_block = row // HEADS
    token = tl.minimum(first_row + in_block, count - 1)
    query_row = (first_token + token).to(tl.int64)
    head = tl.program_id(0) * HEADS + row % HEADS
    stored = (in_block < ROWS) & (first_row + in_block < count) & (head < num_heads)
    real = (head < num_heads)[:, None]
    q = tl.load(q_ptr + (query_row * q_stride_t + head * q_stride_h)[:, None] + dim[None, :],
                real & (dim < RANK)[None, :], other=0.0)
    qr = tl.load(qr_ptr + (query_row * qr_stride_t + head * qr_stride_h)[:, None] + rope[None, :],
                 real & (rope < ROPE)[None, :], other=0.0)
    if MASKED:
        masked_from = whole - tl.load(counts_ptr + block // PER_REQUEST)
        word = tl.load(words_ptr + query_row)
        visible = row
    else:
        masked_from = 0
        word = query_row
        visible = tl.minimum(whole - count + token + 1, end)

    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_ROWS,), tl.float32)
    acc = tl.zeros((BLOCK_RANK, BLOCK_ROWS) if TRANSPOSED else (BLOCK_ROWS, BLOCK_RANK), tl.float32)
    acc, top, total = _add_latents(q, qr, acc, top, total, begin, end, visible, word, masked_from, pages_ptr,
                                   kv_indices_ptr + first_page, stride_page, stride_slot, scale_log2, MASKED,
                                   TRANSPOSED, PAGE, RANK, ROPE, BLOCK_RANK, BLOCK_ROPE, BLOCK_TOKENS)
    result = acc / _of_rows(tl.where(total == 0.0, 1.0, total), TRANSPOSED) * page_scale
    inside = _of_rows(stored, TRANSPOSED) & _of_tokens(dim < RANK, TRANSPOSED)
    if splits == 1:
        at = query_row * num_heads + head
        tl.store(out_ptr + _of_rows(at * RANK, TRANSPOSED) + _of_tokens(dim, TRANSPOSED),
                 result.to(out_ptr.dtype.element_ty), inside)
    else:  # a row may see nothing of a split: its weight is zero then
        at = (split.to(tl.int64) * ROWS + in_block) * num_heads + head
        tl.store(lse_ptr + at, tl.where(total == 0.0, float("-inf"), top + tl.log2(total)), stored)
        tl.store(part_ptr + _of_rows(at * RANK, TRANSPOSED) + _of_tokens(dim, TRANSPOSED), result, inside)


def mla_verify(q: torch.Tensor, q_rope: torch.Tensor, pages: torch.Tensor, qo_indptr: torch.Tensor,
               kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor, scale: float,
               plan: VerifyPlan, tile: VerifyTile, page_scale: float = 1.0, mask: RowMask | None = None,
               out: torch.Tensor | None = None) -> torch.Tensor:
    """``softmax((q l^T + q_rope k^T) * scale) l``, where request b's rows are the last of its sequence: ``[T, H, L]``.

    ``q`` [T, H, L] and ``q_rope`` [T, H, R]; the other arguments are those of ``mla_decode``, and a ``plan`` by
    ``plan_verify`` of the same batch, over ``tile.head_blocks(H)`` KV heads, whose splits are no shorter than
    ``tile.tokens``. With ``mask`` rows see what that says. More pages may be listed than a request has tokens. Rows
    before the first request's, or after the last one's, are not read, nor written in ``out``.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not runs_triton(q):
        reference.mla_attention(q, q_rope, pages, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, scale, page_scale,
                                mask, out)
        return out
    results, heads = split_results(plan, out), min(q.shape[1], tile.heads)
    if tile.warp_specialized and mask is None and fits_warp_groups(q, q_rope, pages, plan.rows * heads):
        from .mla_verify_warp_specialized import mla_verify_warp_specialized  # not there without Triton
        mla_verify_warp_specialized(q, q_rope, pages, qo_indptr, kv_indptr, kv_indices, kv_last_page_len, scale, plan,
                                    heads, page_scale, out, results)
    else:
        _launch(q, q_rope, pages, (qo_indptr, kv_indptr, kv_indices, kv_last_page_len), scale, plan, tile, heads,
                page_scale, mask, out, results)
    if plan.splits.needs_merge:
        merge_rows(results.parts, results.lses, out, qo_indptr, plan, False)
    return out


def fits_warp_groups(q: torch.Tensor, q_rope: torch.Tensor, pages: torch.Tensor, rows: int) -> bool:
    """Says whether blocks of ``rows`` are the tensor cores' tile, and TMA can load the latents. Pages have 16 tokens:
    the kernel is written for 32 and 64, too, but has not run on a GPU with these."""
    page_size, width = pages.shape[1:]
    return (rows == 64 and q.shape[2] == 512 and q_rope.shape[2] == 64 and width == 576 and page_size == 16
            and q.itemsize == 2 and q.dtype == q_rope.dtype == pages.dtype and q.stride(2) == q_rope.stride(2) == 1
            and pages.stride(1) == width and pages.stride(0) % width == 0 and pages.data_ptr() % 16 == 0)


def _launch(q: torch.Tensor, q_rope: torch.Tensor, pages: torch.Tensor, table: tuple[torch.Tensor, ...], scale: float,
            plan: VerifyPlan, tile: VerifyTile, heads: int, page_scale: float, mask: RowMask | None, out: torch.Tensor,
            results: SplitResults) -> None:
    """Launches the kernel above; ``table`` has the arrays of ``mla_verify`` in their order."""
    num_heads, rank = q.shape[1:]
    width, splits = q_rope.shape[2], plan.splits
    _mla_verify_kernel[(tile.head_blocks(num_heads), results.max_splits)](
        q, q_rope, pages, *(mask or (None, None)), out, results.parts, results.lses, *table, plan.length_indptr,
        splits.request_of_split, splits.split_indptr,
        len(splits.split_indptr) - 1, scale * page_scale * 1.4426950408889634, page_scale, q.stride(0), q.stride(1),
        q_rope.stride(0), q_rope.stride(1), pages.stride(0), pages.stride(1), num_heads, PAGE=pages.shape[1],
        ROWS=plan.rows, PER_REQUEST=plan.blocks_per_request, HEADS=heads,
        BLOCK_ROWS=max(16, triton.next_power_of_2(plan.rows * heads)), RANK=rank, ROPE=width,
        BLOCK_RANK=max(16, triton.next_power_of_2(rank)), BLOCK_ROPE=max(16, triton.next_power_of_2(width)),
        BLOCK_TOKENS=tile.tokens, MASKED=mask is not None, TRANSPOSED=tile.transposed, num_warps=tile.warps,
        num_stages=tile.stages, **pdl(q))
