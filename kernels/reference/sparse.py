"""Twins of the kernels of sparse decode attention."""

from __future__ import annotations

import torch

from ..arguments import HeadNorms
from .attention import rotate
from .rows import rmsnorm

_LARGEST_SCORE = 60000.0
_SCORE_BLOCK = 16


def order_channels(q: torch.Tensor, k: torch.Tensor, order: torch.Tensor, cos_sin: torch.Tensor | None = None,
                   positions: torch.Tensor | None = None,
                   norms: HeadNorms | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of ``attention.order_channels.order_channels``."""
    if norms is not None:
        q, k = rmsnorm(q, norms.q_weight, norms.eps)[0], rmsnorm(k, norms.k_weight, norms.eps)[0]
    if cos_sin is not None:
        assert positions is not None
        cos, sin = cos_sin[positions].chunk(2, dim=-1)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    own = order.long()
    shared = own.repeat_interleave(q.shape[1] // k.shape[1], 0)
    return q.gather(-1, shared.expand_as(q)), k.gather(-1, own.expand_as(k))


def plan_sparse_decode(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int, threshold: int,
                       capacity: int, sparse_lengths: torch.Tensor, score_indptr: torch.Tensor, exact: torch.Tensor,
                       sparse: torch.Tensor) -> None:
    """Twin of ``attention.sparse_decode_plan.plan_sparse_decode``."""
    before_last = (kv_indptr.diff() - 1) * page_size
    lengths = before_last + kv_last_page_len
    long = lengths > threshold
    room = (lengths + _SCORE_BLOCK - 1) // _SCORE_BLOCK * _SCORE_BLOCK
    chosen = long & ((room * long).cumsum(0) <= capacity)
    exact.copy_(torch.where(chosen, 1 - before_last, kv_last_page_len))
    sparse.copy_(torch.where(chosen, kv_last_page_len, 1 - before_last))
    score_indptr[0] = 0
    score_indptr[1:] = (room * chosen).cumsum(0)
    sparse_lengths.copy_(lengths * chosen)


def label_scores(q: torch.Tensor, k_pages: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor,
                 num_channels: int, scale: float, lengths: torch.Tensor, score_indptr: torch.Tensor,
                 scores: torch.Tensor, maxima: torch.Tensor) -> None:
    """Twin of ``attention.label_scores.label_scores``."""
    group = q.shape[1] // k_pages.shape[1]
    for b, begin, end in _sparse_requests(lengths, score_indptr):
        keys = _tokens(k_pages[..., :num_channels], kv_indptr, kv_indices, b, end - begin)
        of_heads = q[b, :, :num_channels].float().unflatten(0, (-1, group))
        found = torch.einsum("hgd,htd->hgt", of_heads, keys).flatten(0, 1) * scale
        found = found.clamp(-_LARGEST_SCORE, _LARGEST_SCORE).to(torch.float16)
        blocks = torch.nn.functional.pad(found, (0, -(end - begin) % _SCORE_BLOCK), value=float("-inf"))
        scores[:, begin:begin + blocks.shape[1]] = blocks
        first = begin // _SCORE_BLOCK
        largest = blocks.unflatten(1, (-1, _SCORE_BLOCK)).amax(-1)
        maxima[:, first:first + largest.shape[1]] = largest


def select_tokens(scores: torch.Tensor, lengths: torch.Tensor, score_indptr: torch.Tensor,
                  count: int) -> torch.Tensor:
    """Twin of ``attention.select_tokens.select_tokens``."""
    selected = torch.full((len(lengths), len(scores), count), -1, dtype=torch.int32, device=scores.device)
    for b, begin, end in _sparse_requests(lengths, score_indptr):
        largest = scores[:, begin:end].sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values
        selected[b, :, :largest.shape[1]] = largest.to(torch.int32)
    return selected


def sparse_decode(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, kv_indptr: torch.Tensor,
                  kv_indices: torch.Tensor, selected: torch.Tensor, lengths: torch.Tensor, scale: float,
                  v_scale: float, out: torch.Tensor) -> None:
    """Twin of ``attention.sparse_decode.sparse_decode``."""
    group = q.shape[1] // k_pages.shape[1]
    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        own = selected[b, :, :length].long()[..., None].expand(-1, -1, q.shape[2])
        keys, values = (_tokens(pages, kv_indptr, kv_indices, b, length).repeat_interleave(group, 0).gather(1, own)
                        for pages in (k_pages, v_pages))
        weights = (torch.einsum("hd,htd->ht", q[b].float(), keys) * scale).softmax(-1)
        out[b] = (torch.einsum("ht,htd->hd", weights, values) * v_scale).to(out.dtype)


def _sparse_requests(lengths: torch.Tensor, score_indptr: torch.Tensor) -> list[tuple[int, int, int]]:
    """Returns (request, begin, end) of the scores of each request that has some."""
    return [(b, begin, begin + length)
            for b, (begin, length) in enumerate(zip(score_indptr.tolist(), lengths.tolist())) if length]


def _tokens(pages: torch.Tensor, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, request: int,
            length: int) -> torch.Tensor:
    """Gathers a request's tokens to ``[heads, length, D]`` float32."""
    ids = kv_indices[int(kv_indptr[request]):int(kv_indptr[request + 1])].long()
    values = pages if pages.itemsize > 1 else pages.view(torch.uint8)  # not every device indexes float8
    gathered = values[ids].view(pages.dtype) if pages.itemsize == 1 else values[ids]
    return gathered.transpose(0, 1).flatten(1, 2)[:, :length].float()
