"""A decode step's own keys and values, which are not in pages yet: attention applies rope to them and stores them.

Attention would have to wait for a separate kernel (rope_and_store.py), twice 2 us a layer on an H200. Everything that
attention reads from pages was then written before the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._triton import tl, triton
from ..arguments import HeadNorms


class CurrentKV(NamedTuple):
    """``k`` and ``v`` [B, Hkv, D], views contiguous in D with equal strides, of requests' last tokens, whose
    ``positions`` are [B] int64; ``cos_sin`` [positions, D] float32, cosines in the first half. With ``norms`` heads of
    queries and ``k`` are normed before rope is applied."""

    k: torch.Tensor
    v: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    norms: HeadNorms | None = None


@triton.jit
def rope_angles(cos_sin_ptr, position, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """``(cosines, sines)`` [BLOCK_DIM] of a position: rope makes ``x * cosines + partner * sines`` of a head x, where
    the partners of its first half are the second, and the other way round."""
    HALF: tl.constexpr = DIM // 2
    dim = tl.arange(0, BLOCK_DIM)
    at = cos_sin_ptr + position * DIM + dim % HALF
    cos = tl.load(at, dim < DIM, other=0.0)
    sin = tl.load(at + HALF, dim < DIM, other=0.0)
    return cos, tl.where(dim < HALF, -sin, sin)


@triton.jit
def rope_applied(heads_ptr, inside, weight_ptr, eps, cos, sin, NORM: tl.constexpr, DIM: tl.constexpr,
                 BLOCK_DIM: tl.constexpr):
    """Applies norm and rope to the heads that begin at ``heads_ptr`` [N], where they are ``inside``: ``[N,
    BLOCK_DIM]``, rounded where rope_and_store.py rounds."""
    HALF: tl.constexpr = DIM // 2
    dim = tl.arange(0, BLOCK_DIM)
    other = tl.where(dim < HALF, dim + HALF, dim - HALF)
    there = inside[:, None] & (dim < DIM)[None, :]
    x = tl.load(heads_ptr[:, None] + dim[None, :], there, other=0.0)
    y = tl.load(heads_ptr[:, None] + other[None, :], there, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        level = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        kind = weight_ptr.dtype.element_ty
        x = (wide * level).to(kind) * tl.load(weight_ptr + dim, dim < DIM, other=0.0)[None, :]
        y = (y.to(tl.float32) * level).to(kind) * tl.load(weight_ptr + other, dim < DIM, other=0.0)[None, :]
    return (x.to(tl.float32) * cos[None, :] + y.to(tl.float32) * sin[None, :]).to(heads_ptr.dtype.element_ty)
