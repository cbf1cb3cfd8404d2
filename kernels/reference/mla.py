"""Twins of kernels over pages of latents."""

from __future__ import annotations

import math

import torch

from ..arguments import RowMask, Segment
from .attention import paged_attention, rotate, stored


def mla_rope_and_store(q: torch.Tensor, latent: torch.Tensor, k: torch.Tensor, pages: torch.Tensor,
                       page_of_token: torch.Tensor, offset_in_page: torch.Tensor, cos_sin: torch.Tensor,
                       positions: torch.Tensor, interleaved: bool, page_scale: float = 1.0) -> None:
    """Twin of ``attention.mla_rope_and_store.mla_rope_and_store``."""
    cos, sin = cos_sin[positions].chunk(2, dim=-1)

    def apply_rope(x: torch.Tensor) -> torch.Tensor:
        if not interleaved:
            return rotate(x, cos, sin)
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(halves, cos, sin).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    q.copy_(apply_rope(q))
    row = torch.cat((latent, apply_rope(k[:, None])[:, 0]), dim=-1)
    pages[page_of_token, offset_in_page] = stored(row, page_scale, pages.dtype)


def mla_attention(q: torch.Tensor, q_rope: torch.Tensor, pages: torch.Tensor, qo_indptr: torch.Tensor,
                  kv_indptr: torch.Tensor, kv_indices: torch.Tensor, kv_last_page_len: torch.Tensor,
                  scale: float, page_scale: float = 1.0, mask: RowMask | None = None,
                  out: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of ``attention.mla_verify.mla_verify``, and of ``attention.mla_decode.mla_decode``: one shared head whose
    values are the first part of its keys."""
    keys = pages[:, None].float() * page_scale
    values = torch.nn.functional.pad(keys[..., :q.shape[2]], (0, q_rope.shape[2]))
    whole = paged_attention(torch.cat((q, q_rope), -1), keys, values, qo_indptr, kv_indptr, kv_indices,
                            kv_last_page_len, scale, 1.0, None, None, *(mask or (None, None)))[..., :q.shape[2]]
    if out is None:
        return whole.contiguous()
    rows = slice(int(qo_indptr[0]), int(qo_indptr[-1]))
    out[rows] = whole[rows]
    return out


def mla_prefill(q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, segment: Segment, qo_indptr: torch.Tensor,
                scale: float, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Twin of ``attention.mla_prefill.mla_prefill``."""
    keys, values = kv.float().split([kv.shape[2] - out.shape[2], out.shape[2]], -1)
    keys = torch.cat((keys, k_rope.float()[:, None].expand(-1, kv.shape[1], -1)), -1)
    for b, (first_key, size, own) in enumerate(segment.table.tolist()):
        rows = slice(int(qo_indptr[b]), int(qo_indptr[b + 1]))
        last = own + torch.arange(rows.stop - rows.start, device=q.device)
        seen = torch.arange(size, device=q.device) <= last[:, None]
        if not seen.any():
            continue
        scores = torch.einsum("qhd,khd->qhk", q[rows].float(), keys[first_key:first_key + size]) * scale
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        level = scores.logsumexp(-1)
        weights = (scores - level.masked_fill(level.isinf(), 0.0)[..., None]).exp()
        result = torch.einsum("qhk,khd->qhd", weights, values[first_key:first_key + size])
        if lse is not None:
            level = level * math.log2(math.e)
            joint = torch.logaddexp2(level, lse[rows])
            result = result * (level - joint).exp2()[..., None] + out[rows] * (lse[rows] - joint).exp2()[..., None]
            lse[rows] = joint
        out[rows] = result.to(out.dtype)
