"""Norms queries and keys, applies rope, and reorders each head's channels.

A product of a query and a key does not depend on the order of their channels. Stored in an order of their own, the
channels that matter most are the first values of every key: whoever reads a part of each key reads adjacent memory.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import runs_triton, tl, triton
from ..arguments import HeadNorms

_BLOCK_HEADS = 8
"""Heads of one program, as in rope_and_store.py."""


@triton.jit
def _order_heads(x_ptr, x_stride_h, out_ptr, first_head, num_heads, group, order_ptr, table_ptr, rotated, weight_ptr,
                 eps, ROTATE: tl.constexpr, NORM: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr,
                 BLOCK_HEADS: tl.constexpr):
    """Writes a block of a row's heads to ``out_ptr``; ``group`` of them have the order of one KV head."""
    heads = first_head + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_DIM)
    inside = (heads < num_heads)[:, None] & (dim < DIM)[None, :]
    channel = tl.load(order_ptr + (heads // group)[:, None] * DIM + dim[None, :], inside, other=0)
    row = x_ptr + heads[:, None] * x_stride_h
    x = tl.load(row + channel, inside, other=0.0)
    level = tl.full((BLOCK_HEADS, 1), 1.0, tl.float32)
    if NORM:  # rounded before the weight is applied, as kernels/rowwise/rmsnorm.py does
        wide = x.to(tl.float32)
        level = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        x = (wide * level).to(x.dtype) * tl.load(weight_ptr + channel, inside, other=0.0)
    if ROTATE:
        turned = channel < 2 * rotated
        partner = tl.where(channel < rotated, channel + rotated, channel - rotated)
        partner = tl.where(turned, partner, channel)
        y = tl.load(row + partner, inside, other=0.0)
        if NORM:
            y = (y.to(tl.float32) * level).to(y.dtype) * tl.load(weight_ptr + partner, inside, other=0.0)
        cos = tl.load(table_ptr + channel % rotated, inside & turned, other=1.0)
        sin = tl.load(table_ptr + rotated + channel % rotated, inside & turned, other=0.0)
        sin = tl.where(channel < rotated, -sin, sin)
        x = (x.to(tl.float32) * cos + y.to(tl.float32) * sin).to(x.dtype)
    tl.store(out_ptr + heads[:, None] * DIM + dim[None, :], x, inside)


@triton.jit
def _order_channels_kernel(q_ptr, k_ptr, q_out_ptr, k_out_ptr, order_ptr, cos_sin_ptr, position_ptr, q_stride_t,
                           q_stride_h, k_stride_t, k_stride_h, num_q_heads, num_kv_heads, rotated, q_weight_ptr,
                           k_weight_ptr, eps, ROTATE: tl.constexpr, NORM: tl.constexpr, GROUP: tl.constexpr,
                           DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    table = cos_sin_ptr
    if ROTATE:
        table += tl.load(position_ptr + token) * 2 * rotated
    kv_blocks = tl.cdiv(num_kv_heads, BLOCK_HEADS)
    if block < kv_blocks:
        _order_heads(k_ptr + token * k_stride_t, k_stride_h, k_out_ptr + token * num_kv_heads * DIM,
                     block * BLOCK_HEADS, num_kv_heads, 1, order_ptr, table, rotated, k_weight_ptr, eps, ROTATE, NORM,
                     DIM, BLOCK_DIM, BLOCK_HEADS)
    else:
        _order_heads(q_ptr + token * q_stride_t, q_stride_h, q_out_ptr + token * num_q_heads * DIM,
                     (block - kv_blocks) * BLOCK_HEADS, num_q_heads, GROUP, order_ptr, table, rotated, q_weight_ptr,
                     eps, ROTATE, NORM, DIM, BLOCK_DIM, BLOCK_HEADS)


def order_channels(q: torch.Tensor, k: torch.Tensor, order: torch.Tensor, cos_sin: torch.Tensor | None = None,
                   positions: torch.Tensor | None = None,
                   norms: HeadNorms | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns ``q`` [T, Hq, D] and ``k`` [T, Hkv, D], normed by ``norms`` and with rope applied, with their channels in
    another order, contiguous: value i of KV head h, and of the query heads that share it, is channel ``order[h, i]``.

    ``q`` and ``k`` are views contiguous in D; ``order`` [Hkv, D] int32 has a permutation of the channels of each head;
    ``cos_sin`` [positions, R] float32, ``positions`` [T] int64 and ``norms`` as in ``rope_and_store``.
    """
    if not runs_triton(q):
        return reference.order_channels(q, k, order, cos_sin, positions, norms)
    tokens, num_q_heads, dim = q.shape
    num_kv_heads = k.shape[1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    blocks = -(-num_kv_heads // _BLOCK_HEADS) + -(-num_q_heads // _BLOCK_HEADS)
    _order_channels_kernel[(tokens, blocks)](
        q, k, q_out, k_out, order, cos_sin, positions, q.stride(0), q.stride(1), k.stride(0), k.stride(1), num_q_heads,
        num_kv_heads, 1 if cos_sin is None else cos_sin.shape[1] // 2, norms.q_weight if norms else q,
        norms.k_weight if norms else k, norms.eps if norms else 0.0, ROTATE=cos_sin is not None,
        NORM=norms is not None, GROUP=num_q_heads // num_kv_heads, DIM=dim,
        BLOCK_DIM=max(16, triton.next_power_of_2(dim)), BLOCK_HEADS=_BLOCK_HEADS, num_warps=4)
    return q_out, k_out
