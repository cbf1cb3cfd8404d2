"""Reduces the partial sums of a split product and norms the result in one kernel."""

from __future__ import annotations

import torch

from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from .rmsnorm import normed, rmsnorm


@triton.jit
def _split_k_rmsnorm_kernel(partial_ptr, residual_ptr, sum_ptr, y_ptr, weight_ptr, eps, split_values, width,
                            SPLITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    start_next(PDL)
    weight = tl.load(weight_ptr + columns, inside, other=0.0)
    wait_for_last(PDL)
    offset = row * width + columns
    made = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        made += tl.load(partial_ptr + tl.cast(split, tl.int64) * split_values + offset, inside,
                        other=0.0).to(tl.float32)
    # Rounded as a product's result is.
    x = made.to(sum_ptr.dtype.element_ty) + tl.load(residual_ptr + offset, inside, other=0.0)
    tl.store(sum_ptr + offset, x, inside)
    tl.store(y_ptr + offset, normed(x, weight, eps, width), inside)


def split_k_rmsnorm(partials: torch.Tensor, weight: torch.Tensor, eps: float,
                    residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``rmsnorm`` of the sum in float32 over ``partials`` [pieces, rows, width], contiguous, of which the first T rows
    count, with ``residual`` [T, width], contiguous: ``(normed, x + residual)`` in its type."""
    if not runs_triton(residual):
        return rmsnorm(partials.float().sum(0)[:len(residual)].to(residual.dtype), weight, eps, residual)
    (rows, width), block = residual.shape, triton.next_power_of_2(residual.shape[1])
    y, total = torch.empty_like(residual), torch.empty_like(residual)
    if rows:
        _split_k_rmsnorm_kernel[(rows,)](
            partials, residual, total, y, weight, eps, partials[0].numel(), width, SPLITS=len(partials), BLOCK=block,
            num_warps=max(1, min(16, block // 512)), **pdl(residual))
    return y, total
