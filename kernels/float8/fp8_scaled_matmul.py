"""Multiplies two float8 matrices with a scale for each row or one for all: many rows by ``torch._scaled_mm``, few by
our kernels, which keep the whole GPU reading weights."""

from __future__ import annotations

from functools import lru_cache

import torch

from .. import reference
from .._triton import runs_triton
from ..gemm.small_m_matmul import small_m_matmul
from ..tuning.policy import policy_of
from .fp8_matmul import fp8_matmul


def scaled_matmul(x: torch.Tensor, x_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
                  dtype: torch.dtype) -> torch.Tensor:
    """``(x * x_scale) @ (weight * weight_scale).T`` in ``dtype``: ``[T, out]``.

    ``x`` [T, in] and ``weight`` [out, in] float8, both contiguous; ``x_scale`` float32 [T, 1] or [1], ``weight_scale``
    float32 [out] or [1]. On a GPU ``in`` and ``out`` must be multiples of 16; scales by row give bfloat16 alone.
    """
    if not x.is_cuda:
        return reference.scaled_matmul(x, x_scale, weight, weight_scale, dtype)
    rows, out = x.shape[0], weight.shape[0]
    if not rows:
        return torch.empty((0, out), dtype=dtype, device=x.device)
    policy = policy_of(x.device)
    if rows <= policy.gemm.small_m_max_rows(*weight.shape, weight.itemsize):
        return small_m_matmul(x, weight, x_scale=x_scale, scale=weight_scale, dtype=dtype)
    if rows <= policy.float8.max_rows and runs_triton(x):
        return fp8_matmul(x, x_scale, weight, weight_scale, "row", dtype)
    if x_scale.numel() != 1 or weight_scale.numel() != 1:
        x_scale = x_scale.flatten()[:, None].expand(rows, 1).contiguous()
        weight_scale = weight_scale.reshape(1, -1).expand(1, out).contiguous()
    return torch._scaled_mm(x, weight.t(), scale_a=x_scale, scale_b=weight_scale, out_dtype=dtype, use_fast_accum=True)


@lru_cache
def compile_tiles(out: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernels of few rows for such a weight, so that no request waits for the compiler."""
    weight = torch.zeros((out, width), dtype=torch.float8_e4m3fn, device=device)
    scale = torch.zeros(out, dtype=torch.float32, device=device)
    for rows in (1, 17, 65):
        x = torch.zeros((rows, width), dtype=weight.dtype, device=device)
        scaled_matmul(x, torch.zeros((rows, 1), device=device), weight, scale, dtype)
