"""A decode step's keys and values before they are in pages: attention turns them, takes them in and stores them.

A kernel of its own for that (rope_and_store.py) would have attention wait for it, twice 2 us a layer on an H200; and
what attention reads from pages has then all been written before the step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .._triton import tl, triton
from ..arguments import HeadNorms


class CurrentKV(NamedTuple):
    """``k`` and ``v`` [B, Hkv, D], views contiguous in D with equal strides, of requests' last tokens, whose
    ``positions`` are [B] int64; ``cos_sin`` [positions, D] float32, cosines in the first half. With ``norms`` heads of
    queries and ``k`` are normed before they are turned."""

    k: torch.Tensor
    v: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    norms: HeadNorms | None = None


@triton.jit
def angles_of(cos_sin_ptr, position, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr):
    """``(cosines, sines)`` [BLOCK_DIM] of a position: a head x is turned as ``x * cosines + partner * sines``, where
    the partners of its first half are the second, and the other way round."""
    HALF: tl.constexpr = DIM // 2
    dim = tl.arange(0, BLOCK_DIM)
    at = cos_sin_ptr + position * DIM + dim % HALF
    cos = tl.load(at, dim < DIM, other=0.0)
    sin = tl.load(at + HALF, dim < DIM, other=0.0)
    return cos, tl.where(dim < HALF, -sin, sin)


@triton.jit
def turned(heads_ptr, inside, weight_ptr, eps, cos, sin, NORM: tl.constexpr, DIM: tl.constexpr,
           BLOCK_DIM: tl.constexpr):
    """``[N, BLOCK_DIM]`` of the heads that begin at ``heads_ptr`` [N], where they are ``inside``: rounded where
    rope_and_store.py rounds."""
    HALF: tl.constexpr = DIM // 2
    dim = tl.arange(0, BLOCK_DIM)
    other = tl.where(dim < HALF, dim + HALF, dim - HALF)
    there = inside[:, None] & (dim < DIM)[None, :]
    x = tl.load(heads_ptr[:, None] + dim[None, :], there, other=0.0)
    y = tl.load(heads_ptr[:, None] + other[None, :], there, other=0.0)
    if NORM:
        wide = x.to(tl.float32)
        level = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        x = (wide * level).to(x.dtype) * tl.load(weight_ptr + dim, dim < DIM, other=0.0)[None, :]
        y = (y.to(tl.float32) * level).to(y.dtype) * tl.load(weight_ptr + other, dim < DIM, other=0.0)[None, :]
    return (x.to(tl.float32) * cos[None, :] + y.to(tl.float32) * sin[None, :]).to(x.dtype)
