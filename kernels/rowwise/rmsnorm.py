"""Root-mean-square norm, fused with the residual addition before it."""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last


@triton.jit
def normed(x, weight, eps, width):
    """Norms ``x`` [BLOCK], of which the first ``width`` values are a row and the others 0, in its type."""
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    # Rounded before the weight is applied: transformers does so, and in bf16 the other order gives other values.
    # Weights in float32 are applied to values in float32.
    return (wide * scale).to(weight.dtype) * weight


@triton.jit
def _rmsnorm_kernel(x_ptr, residual_ptr, sum_ptr, y_ptr, weight_ptr, eps, inner, stride_outer, stride_inner, width,
                    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    start_next(PDL)
    weight = tl.load(weight_ptr + columns, inside, other=0.0)
    wait_for_last(PDL)
    begin = (row // inner) * stride_outer + (row % inner) * stride_inner
    x = tl.load(x_ptr + begin + columns, inside, other=0.0)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * width + columns, inside, other=0.0)
        tl.store(sum_ptr + row * width + columns, x, inside)
    y = normed(x, weight, eps, width)
    tl.store(y_ptr + row * width + columns, y, inside)


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float,
            residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``(norm(x + residual) * weight, x + residual)``, over the last dimension.

    ``x`` is ``[T, width]`` or ``[T, heads, width]``, contiguous in its last dimension; a residual has its shape and
    is contiguous. Without a residual the second result is ``x`` itself.
    """
    if not runs_triton(x):
        return reference.rmsnorm(x, weight, eps, residual)
    width = x.shape[-1]
    inner = x.shape[1] if x.dim() == 3 else 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y) if residual is not None else x
    if rows := x.shape[0] * inner:
        block = triton.next_power_of_2(width)
        _rmsnorm_kernel[(rows,)](x, residual, total, y, weight, eps, inner, x.stride(0), x.stride(-2), width,
                                 HAS_RESIDUAL=residual is not None, BLOCK=block,
                                 num_warps=max(1, min(16, block // 512)), **pdl(x))
    return y, total
