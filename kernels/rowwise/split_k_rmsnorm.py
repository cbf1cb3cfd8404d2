"""The norm behind a product that has left its sums in pieces: it adds them up as it reads them."""

from __future__ import annotations

import torch

from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from .rmsnorm import normed, rmsnorm


@triton.jit
def _joined_rmsnorm_kernel(part_ptr, residual_ptr, sum_ptr, y_ptr, weight_ptr, eps, piece_values, width,
                           PIECES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    start_next(PDL)
    weight = tl.load(weight_ptr + columns, inside, other=0.0)
    wait_for_last(PDL)
    place = row * width + columns
    made = tl.zeros((BLOCK,), tl.float32)
    for piece in tl.static_range(PIECES):
        made += tl.load(part_ptr + tl.cast(piece, tl.int64) * piece_values + place, inside, other=0.0).to(tl.float32)
    # Rounded as a product's result.
    x = made.to(sum_ptr.dtype.element_ty) + tl.load(residual_ptr + place, inside, other=0.0)
    tl.store(sum_ptr + place, x, inside)
    tl.store(y_ptr + place, normed(x, weight, eps, width), inside)


def joined_rmsnorm(parts: torch.Tensor, weight: torch.Tensor, eps: float,
                   residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``rmsnorm`` of the sum in float32 over ``parts`` [pieces, rows, width], contiguous, of which the first T rows
    count, with ``residual`` [T, width], contiguous: ``(normed, x + residual)`` in its type."""
    if not runs_triton(residual):
        return rmsnorm(parts.float().sum(0)[:len(residual)].to(residual.dtype), weight, eps, residual)
    (rows, width), block = residual.shape, triton.next_power_of_2(residual.shape[1])
    y, total = torch.empty_like(residual), torch.empty_like(residual)
    if rows:
        _joined_rmsnorm_kernel[(rows,)](
            parts, residual, total, y, weight, eps, parts[0].numel(), width, PIECES=len(parts), BLOCK=block,
            num_warps=max(1, min(16, block // 512)), **pdl(residual))
    return y, total
