"""Rotary embedding of multi-head latent attention, fused with storing the latents into the KV pool.

Rope applies to a part of each query, and to one key part that all heads share.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last

_BLOCK_HEADS = 8


@triton.jit
def _stored(x, factor, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    """``x`` as pages hold it: in float8, whose largest value is LARGEST, times ``factor``; else LARGEST is 0."""
    if LARGEST > 0:
        x = tl.minimum(tl.maximum(x.to(tl.float32) * factor, -LARGEST), LARGEST).to(DTYPE)
    return x


@triton.jit
def _apply_rope_to_pairs(source_ptr, target_ptr, stride_h, heads, num_heads, cos, sin, half, factor,
                         LARGEST: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Apply rope to each pair of elements of a block of heads, and write it to the target as ``_stored``."""
    pair = tl.arange(0, BLOCK_HALF)
    inside = (heads < num_heads)[:, None] & (pair < half)[None, :]
    if INTERLEAVED:
        first = heads[:, None] * stride_h + 2 * pair[None, :]
        second = first + 1
    else:
        first = heads[:, None] * stride_h + pair[None, :]
        second = first + half
    a = tl.load(source_ptr + first, inside, other=0.0)
    b = tl.load(source_ptr + second, inside, other=0.0)
    x = a.to(tl.float32)
    y = b.to(tl.float32)
    rope_applied = (x * cos[None, :] - y * sin[None, :]).to(a.dtype)
    tl.store(target_ptr + first, _stored(rope_applied, factor, target_ptr.dtype.element_ty, LARGEST), inside)
    rope_applied = (y * cos[None, :] + x * sin[None, :]).to(a.dtype)
    tl.store(target_ptr + second, _stored(rope_applied, factor, target_ptr.dtype.element_ty, LARGEST), inside)


@triton.jit
def _mla_rope_and_store_kernel(q_ptr, latent_ptr, k_ptr, pages_ptr, page_ptr, offset_ptr, cos_sin_ptr, position_ptr,
                               q_stride_t, q_stride_h, latent_stride_t, k_stride_t, stride_page, stride_slot, num_heads,
                               rank, half, factor, LARGEST: tl.constexpr, INTERLEAVED: tl.constexpr,
                               BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
                               PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    pair = tl.arange(0, BLOCK_HALF)
    table = cos_sin_ptr + tl.load(position_ptr + token) * 2 * half
    cos = tl.load(table + pair, pair < half, other=0.0)
    sin = tl.load(table + half + pair, pair < half, other=0.0)
    heads = tl.arange(0, BLOCK_HEADS)
    if block == 0:
        slot = tl.load(page_ptr + token) * stride_page + tl.load(offset_ptr + token) * stride_slot
        column = tl.arange(0, BLOCK_RANK)
        latent = tl.load(latent_ptr + token * latent_stride_t + column, column < rank, other=0.0)
        tl.store(pages_ptr + slot + column, _stored(latent, factor, pages_ptr.dtype.element_ty, LARGEST),
                 column < rank)
        # The shared key is the one head of this block.
        _apply_rope_to_pairs(k_ptr + token * k_stride_t, pages_ptr + slot + rank, 0, heads, 1, cos, sin, half, factor,
                    LARGEST, INTERLEAVED, BLOCK_HALF)
    else:
        q = q_ptr + token * q_stride_t
        _apply_rope_to_pairs(q, q, q_stride_h, (block - 1) * BLOCK_HEADS + heads, num_heads, cos, sin, half, 1.0, 0,
                    INTERLEAVED, BLOCK_HALF)


def mla_rope_and_store(q: torch.Tensor, latent: torch.Tensor, k: torch.Tensor, pages: torch.Tensor,
                       page_of_token: torch.Tensor, offset_in_page: torch.Tensor, cos_sin: torch.Tensor,
                       positions: torch.Tensor, interleaved: bool, page_scale: float = 1.0) -> None:
    """Apply rope to ``q`` in place and to ``k``; store ``latent``, followed by ``k``, at ``(page_of_token,
    offset_in_page)``.

    ``q`` [T, H, R], the part of the queries with rope; ``latent`` [T, L], ``k`` [T, R], views contiguous in their last
    dimension; ``pages`` one layer of a pool of latents [pages, page_size, L + R]; ``page_of_token``,
    ``offset_in_page`` and ``positions`` [T] int64; ``cos_sin`` [positions, R] float32, cosines in the first half.
    Elements 2i and 2i + 1 make a pair if ``interleaved``, else i and i + R / 2; their order does not change.
    Float8 pages hold values divided by ``page_scale``; for other pages it is 1.
    """
    if not runs_triton(q):
        reference.mla_rope_and_store(q, latent, k, pages, page_of_token, offset_in_page, cos_sin, positions,
                                     interleaved, page_scale)
        return
    tokens, num_heads, width = q.shape
    rank, half = latent.shape[1], width // 2
    _mla_rope_and_store_kernel[(tokens, 1 + triton.cdiv(num_heads, _BLOCK_HEADS))](
        q, latent, k, pages, page_of_token, offset_in_page, cos_sin, positions, q.stride(0), q.stride(1),
        latent.stride(0), k.stride(0), pages.stride(0), pages.stride(1), num_heads, rank, half,
        1 / page_scale, LARGEST=torch.finfo(pages.dtype).max if pages.itemsize == 1 else 0,
        INTERLEAVED=interleaved, BLOCK_RANK=triton.next_power_of_2(rank), BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_HEADS=_BLOCK_HEADS, num_warps=2, **pdl(q))
