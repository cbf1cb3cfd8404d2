"""Twins of kernels over pages of keys and values."""

from __future__ import annotations

import math

import torch

from ..arguments import HeadNorms
from .rows import rmsnorm


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rope to the first R values of ``x`` [T, heads, D] by ``cos``, ``sin`` [T, R / 2]; element i pairs with
    element i + R / 2."""
    dim = 2 * cos.shape[-1]
    first, second = x[..., :dim].float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), dim=-1)


def rope_and_store(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
                   page_of_token: torch.Tensor, offset_in_page: torch.Tensor,
                   cos_sin: torch.Tensor | None = None, positions: torch.Tensor | None = None,
                   k_scale: float = 1.0, v_scale: float = 1.0, norms: HeadNorms | None = None,
                   rope_keys_in_place: bool = False) -> None:
    """Twin of ``attention.rope_and_store.rope_and_store``."""
    given = k
    if norms is not None:
        q.copy_(rmsnorm(q, norms.q_weight, norms.eps)[0])
        k = rmsnorm(k, norms.k_weight, norms.eps)[0]
    if cos_sin is not None:
        assert positions is not None
        cos, sin = cos_sin[positions].chunk(2, dim=-1)
        q.copy_(rotate(q, cos, sin))
        k = rotate(k, cos, sin)
    if rope_keys_in_place:
        given.copy_(k)
    k_pages[page_of_token, :, offset_in_page] = stored(k, k_scale, k_pages.dtype)
    v_pages[page_of_token, :, offset_in_page] = stored(v, v_scale, v_pages.dtype)


def stored(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """``x`` as pages of ``dtype`` hold it; float8 values saturate."""
    if dtype.itemsize > 1:
        return x
    largest = torch.finfo(dtype).max
    return (x.float() * (1 / scale)).clamp(-largest, largest).to(dtype)


def paged_attention(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, qo_indptr: torch.Tensor,
                    kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor,
                    scale: float, v_scale: float = 1.0, window: int | None = None,
                    sinks: torch.Tensor | None = None, words: torch.Tensor | None = None,
                    counts: torch.Tensor | None = None, softcap: float = 0.0) -> torch.Tensor:
    """Attention over paged KV, request by request: the twin of ``attention.paged_prefill.paged_prefill``, and with the
    ``words`` and ``counts`` of a RowMask that of ``attention.verify_attention.verify_attention``.

    Written for clarity, in float32 and with the whole score matrix.
    """
    out = torch.empty_like(q)
    page_size = k_pages.shape[2]
    group = q.shape[1] // k_pages.shape[1]
    for b in range(len(kv_last_page_len)):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        pages = kv_indices[int(kv_indptr[b]):int(kv_indptr[b + 1])].long()
        length = (len(pages) - 1) * page_size + int(kv_last_page_len[b])
        keys, values = (_tokens(x, pages, length).float().repeat_interleave(group, 0) for x in (k_pages, v_pages))
        scores = torch.einsum("qhd,hkd->hqk", q[rows].float(), keys) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        count = scores.shape[1]
        if words is None or counts is None:
            visible = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
            if window:
                visible = visible.triu(length - count - window + 1)
        else:
            visible = visible_by_words(words[rows], length, int(counts[b]), window)
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, count, -1)), -1)
        weights = scores.softmax(-1)[..., :length]
        out[rows] = (torch.einsum("hqk,hkd->qhd", weights, values) * v_scale).to(q.dtype)
    return out


def visible_by_words(words: torch.Tensor, length: int, count: int, window: int | None) -> torch.Tensor:
    """``[rows, length]`` bool: the slots that rows with these ``words`` [rows] int64 see, of a request of ``length``
    slots, whose last ``count`` have a bit each; see ``attention.verify_attention.RowMask``."""
    bits = (words[:, None] >> torch.arange(count, device=words.device)) & 1 != 0
    before = torch.ones(len(words), length - count, dtype=torch.bool, device=words.device)
    if window:
        position = length - count + bits.sum(1, keepdim=True) - 1
        before = torch.arange(length - count, device=words.device) > position - window
    return torch.cat((before, bits), 1)


def block_lengths(qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor,
                  length_indptr: torch.Tensor, page_size: int, rows: int, per_request: int, masked: bool) -> None:
    """Fills in the lengths that blocks of rows see, as ``attention.verify_attention.plan_verify`` does."""
    counts, lengths = qo_indptr.diff(), (kv_indptr.diff() - 1) * page_size + kv_last_page_len
    first_rows = torch.arange(per_request, device=counts.device) * rows
    ends = torch.minimum(first_rows + rows, counts[:, None])
    seen = lengths[:, None].expand_as(ends) if masked else (lengths - counts)[:, None] + ends
    length_indptr[0] = 0
    length_indptr[1:] = seen.masked_fill(first_rows >= counts[:, None], 0).flatten().cumsum(0)


def move_slots(memory: torch.Tensor, page_of_row: torch.Tensor, offset_in_page: torch.Tensor, first_rows: torch.Tensor,
               paths: torch.Tensor) -> None:
    """Twin of ``attention.move_slots.move_slots``."""
    targets = first_rows[:, None] + torch.arange(paths.shape[1], device=paths.device)
    moved = (paths < len(page_of_row)) & (paths != targets)
    rows, targets = paths[moved], targets[moved]
    values = memory if memory.itemsize > 1 else memory.view(torch.uint8)  # not every device indexes float8
    values[page_of_row[targets], :, :, :, offset_in_page[targets]] = values[page_of_row[rows], :, :, :,
                                                                           offset_in_page[rows]]


def scale_by_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Twin of ``attention.scale_by_sinks.scale_by_sinks``."""
    share = torch.sigmoid(lse * math.log(2) - sinks)
    out.copy_((out.float() * share[..., None]).to(out.dtype))


def plan_decode(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, request_of_split: torch.Tensor,
                split_indptr: torch.Tensor, page_size: int, programs: int, min_tokens: int, max_rounds: int = 1,
                window: int | None = None) -> None:
    """Twin of ``attention.decode_plan.plan_decode``."""
    lengths = (kv_indptr.diff() - 1) * page_size + kv_last_page_len
    if window:
        lengths = lengths.clamp(max=window)
    share = -(-int(lengths.sum()) // programs) if max_rounds else 0
    tokens_per_split = max(min_tokens, share)
    counts = ((lengths + tokens_per_split // 2) // tokens_per_split).clamp(min=1)
    if not max_rounds:
        counts = counts.clamp(max=programs)
    elif -(-int(counts.sum()) // programs) * int((-(-lengths // counts)).max()) > share + share // 8:
        tokens_per_split = max(min_tokens, -(-share // max_rounds))
        counts = ((lengths + tokens_per_split // 2) // tokens_per_split).clamp(min=1)
    split_indptr[0] = 0
    split_indptr[1:] = counts.cumsum(0)
    request_of_split[:int(counts.sum())] = torch.arange(len(counts), dtype=request_of_split.dtype,
                                              device=request_of_split.device).repeat_interleave(counts)


def _tokens(pool: torch.Tensor, pages: torch.Tensor, length: int) -> torch.Tensor:
    """Gathers the pages of one request to ``[heads, length, D]``."""
    return pool[pages].transpose(0, 1).flatten(1, 2)[:, :length]


def dequantize_pages(k_pages: torch.Tensor, v_pages: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype,
                     k_scale: float = 1.0, v_scale: float = 1.0) -> torch.Tensor:
    """Twin of ``attention.dequantize_pages.dequantize_pages``."""
    taken = [pages[ids.long()].float() * scale for pages, scale in ((k_pages, k_scale), (v_pages, v_scale))]
    return torch.stack(taken, 1).to(dtype)
