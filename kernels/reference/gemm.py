"""Twins of matrix products."""

from __future__ import annotations

import torch

from ..tuning.policy import policy_of
from .fixed_rows import batch_invariant_matmul


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``x`` [T, in] ``@ weight`` [out, in] ``.T`` in their type; by calls of fixed numbers of rows where the policy is
    batch-invariant."""
    if policy_of(x.device).batch_invariant:
        return batch_invariant_matmul(x, weight)
    return x @ weight.T


def scaled_matmul(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
                  dtype: torch.dtype) -> torch.Tensor:
    """Twin of ``float8.fp8_scaled_matmul.scaled_matmul``."""
    return (product(x.float(), weight.float()) * x_scale * weight_scale).to(dtype)


def block_matmul(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
                 block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Twin of ``float8.fp8_block_matmul.block_matmul``."""
    wide = x.float() * _spread(x_scale, block[1], x.shape[1], dim=1)
    scale = _spread(_spread(weight_scale, block[0], weight.shape[0], dim=0), block[1], weight.shape[1], dim=1)
    return product(wide, weight.float() * scale).to(dtype)


def small_m_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *,
                   x_scale: torch.Tensor | None = None, scale: torch.Tensor | None = None,
                   dtype: torch.dtype | None = None) -> torch.Tensor:
    """Twin of ``gemm.small_m_matmul.small_m_matmul``."""
    y = x.float() @ weight.float().T
    if x_scale is not None and scale is not None:
        y = y * x_scale * scale
    return (y if bias is None else y + bias.float()).to(dtype or x.dtype)


def _spread(scale: torch.Tensor, size: int, total: int, dim: int) -> torch.Tensor:
    """Repeats each scale for the ``size`` values of its group, cut to ``total``."""
    return scale.repeat_interleave(size, dim).narrow(dim, 0, total)


def per_head_matmul(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Twin of ``attention.per_head_matmul.per_head_matmul``; where rows depend on the batch it returns a view, its
    heads before its rows."""
    if policy_of(x.device).batch_invariant:
        return torch.stack([batch_invariant_matmul(x[:, head], matrix.T) for head, matrix in enumerate(w)], 1)
    return torch.bmm(x.transpose(0, 1), w).transpose(0, 1)
