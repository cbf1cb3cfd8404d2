"""Norms queries and keys and applies rope, fused with storing keys and values into the KV pool."""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..arguments import HeadNorms

_BLOCK_HEADS = 8
"""Heads of one program: 16 KiB of a 128-wide head's bf16. One head a program took 3 % of a prefill at 8B."""


@triton.jit
def _apply_rope(x_ptr, x_stride_h, out_ptr, out_stride_h, first_head, num_heads, cos, sin, half, rotated, factor,
                weight_ptr, eps, LARGEST: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
                ROTATE: tl.constexpr, PARTIAL: tl.constexpr, NORM: tl.constexpr, IN_PLACE: tl.constexpr):
    """Apply rope to a block of heads, the first half of each paired with its second, and write it to ``out_ptr``;
    ``IN_PLACE``: also to ``x_ptr``. ``PARTIAL``: of the first 2 * ``rotated`` values of a head the first half is paired
    with the second, and so are the values after them, for which ``cos`` is 1 and ``sin`` is 0.

    Into float8, whose largest value is LARGEST, they are written times ``factor``; else LARGEST is 0.
    """
    heads = first_head + tl.arange(0, BLOCK_HEADS)
    columns = tl.arange(0, HALF)
    inside = (heads < num_heads)[:, None] & (columns < half)[None, :]
    at = columns
    to_partner = half
    if PARTIAL:
        at = tl.where(columns < rotated, columns, columns + rotated)
        to_partner = tl.where(columns < rotated, rotated, half - rotated)
    source = x_ptr + heads[:, None] * x_stride_h + at[None, :]
    target = out_ptr + heads[:, None] * out_stride_h + at[None, :]
    first = tl.load(source, inside, other=0.0)
    second = tl.load(source + to_partner, inside, other=0.0)
    if NORM:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        level = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * half) + eps)[:, None]
        # Rounded before the weight is applied, as kernels/rowwise/rmsnorm.py does.
        first = (a * level).to(weight_ptr.dtype.element_ty) * tl.load(weight_ptr + at, columns < half,
                                                                      other=0.0)[None, :]
        second = (b * level).to(weight_ptr.dtype.element_ty) * tl.load(weight_ptr + at + to_partner, columns < half,
                                                                       other=0.0)[None, :]
    if ROTATE:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        first = (a * cos[None, :] - b * sin[None, :]).to(first.dtype)
        second = (b * cos[None, :] + a * sin[None, :]).to(second.dtype)
    if IN_PLACE:
        tl.store(source, first, inside)
        tl.store(source + to_partner, second, inside)
    if LARGEST > 0:
        first = tl.minimum(tl.maximum(first.to(tl.float32) * factor, -LARGEST), LARGEST).to(out_ptr.dtype.element_ty)
        second = tl.minimum(tl.maximum(second.to(tl.float32) * factor, -LARGEST), LARGEST).to(out_ptr.dtype.element_ty)
    tl.store(target, first, inside)
    tl.store(target + to_partner, second, inside)


@triton.jit
def _rope_and_store_kernel(q_ptr, k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, page_ptr, offset_ptr, cos_sin_ptr,
                           position_ptr, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
                           stride_page, stride_head, stride_slot, num_q_heads, num_kv_heads, half, rotated,
                           k_factor, v_factor, q_weight_ptr, k_weight_ptr, eps, LARGEST: tl.constexpr,
                           ROTATE: tl.constexpr, PARTIAL: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr,
                           BLOCK_HEADS: tl.constexpr, ROPE_KEYS_IN_PLACE: tl.constexpr,
                           INPUTS_READY: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    if not INPUTS_READY:
        wait_for_last(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = tl.arange(0, HALF)
    cos = tl.full((HALF,), 1.0, tl.float32)
    sin = tl.full((HALF,), 0.0, tl.float32)
    if ROTATE:
        pairs = half
        if PARTIAL:
            pairs = rotated
        table = cos_sin_ptr + tl.load(position_ptr + token, cache_modifier=".cg") * 2 * pairs
        cos = tl.load(table + columns, columns < pairs, other=1.0 if PARTIAL else 0.0)
        sin = tl.load(table + pairs + columns, columns < pairs, other=0.0)
    slot = tl.load(page_ptr + token, cache_modifier=".cg") * stride_page
    slot += tl.load(offset_ptr + token, cache_modifier=".cg") * stride_slot
    if INPUTS_READY:
        wait_for_last(PDL)
    kv_blocks = tl.cdiv(num_kv_heads, BLOCK_HEADS)
    if block < kv_blocks:
        _apply_rope(k_ptr + token * k_stride_t, k_stride_h, k_pages_ptr + slot, stride_head, block * BLOCK_HEADS,
              num_kv_heads, cos, sin, half, rotated, k_factor, k_weight_ptr, eps, LARGEST, HALF, BLOCK_HEADS, ROTATE,
              PARTIAL, NORM, ROPE_KEYS_IN_PLACE)
    elif block < 2 * kv_blocks:
        _apply_rope(v_ptr + token * v_stride_t, v_stride_h, v_pages_ptr + slot, stride_head,
              (block - kv_blocks) * BLOCK_HEADS, num_kv_heads, cos, sin, half, rotated, v_factor, k_weight_ptr,
              eps, LARGEST, HALF, BLOCK_HEADS, False, False, False, False)
    else:
        q = q_ptr + token * q_stride_t
        _apply_rope(q, q_stride_h, q, q_stride_h, (block - 2 * kv_blocks) * BLOCK_HEADS, num_q_heads, cos, sin, half,
                    rotated, 1.0, q_weight_ptr, eps, 0, HALF, BLOCK_HEADS, ROTATE, PARTIAL, NORM, False)


def rope_and_store(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor,
                   page_of_token: torch.Tensor, offset_in_page: torch.Tensor,
                   cos_sin: torch.Tensor | None = None, positions: torch.Tensor | None = None,
                   k_scale: float = 1.0, v_scale: float = 1.0, norms: HeadNorms | None = None,
                   inputs_ready: bool = False, rope_keys_in_place: bool = False) -> None:
    """Apply rope to ``q`` in place and to ``k``; store ``k`` and ``v`` at ``(page_of_token, offset_in_page)``.
    ``rope_keys_in_place``: ``k`` itself changes, too.

    ``q`` [T, Hq, D], ``k`` and ``v`` [T, Hkv, D], views contiguous in D; ``k_pages`` and ``v_pages`` one layer of
    the pool with equal strides [pages, Hkv, page_size, D]; ``page_of_token``, ``offset_in_page`` and ``positions``
    [T] int64; ``cos_sin`` [positions, R] float32, cosines in the first half, rotates the first R values of a head, at
    most D and like D even. Without ``cos_sin`` there is no rope.
    Float8 pages hold keys divided by ``k_scale`` and values divided by ``v_scale``; for others the scales are 1. With
    ``norms`` heads of ``q`` and ``k`` are normed first. ``inputs_ready``: pages, offsets, positions and ``cos_sin``
    were written before the last launch without PDL (kernels/_triton.py).
    """
    if not runs_triton(q):
        reference.rope_and_store(q, k, v, k_pages, v_pages, page_of_token, offset_in_page, cos_sin, positions,
                                 k_scale, v_scale, norms, rope_keys_in_place)
        return
    assert k_pages.stride() == v_pages.stride()
    tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    rotates = cos_sin is not None
    # Python's own arithmetic: Triton's functions take microseconds a call, in every layer of every step of prompts.
    blocks = 2 * -(-num_kv_heads // _BLOCK_HEADS)
    if rotates or norms is not None:
        blocks += -(-num_q_heads // _BLOCK_HEADS)
    half = head_dim // 2
    rotated = half if cos_sin is None else cos_sin.shape[1] // 2
    _rope_and_store_kernel[(tokens, blocks)](
        q, k, v, k_pages, v_pages, page_of_token, offset_in_page, cos_sin, positions, q.stride(0), q.stride(1),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), k_pages.stride(0), k_pages.stride(1), k_pages.stride(2),
        num_q_heads, num_kv_heads, half, rotated, 1 / k_scale, 1 / v_scale, norms.q_weight if norms else q,
        norms.k_weight if norms else k, norms.eps if norms else 0.0,
        LARGEST=torch.finfo(k_pages.dtype).max if k_pages.itemsize == 1 else 0, ROTATE=rotates, PARTIAL=rotated != half,
        NORM=norms is not None, HALF=1 << (half - 1).bit_length(), BLOCK_HEADS=_BLOCK_HEADS,
        ROPE_KEYS_IN_PLACE=rope_keys_in_place and (rotates or norms is not None), INPUTS_READY=inputs_ready,
        num_warps=2, **pdl(q))
