"""The gated activation of a Llama-like MLP."""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last


@triton.jit
def silu_times(gate, up):
    """``silu(gate) * up`` of float32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _silu_and_mul_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * 2 * width + columns, inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + columns, inside, other=0.0).to(tl.float32)
    y = silu_times(gate, up)
    tl.store(y_ptr + row * width + columns, y.to(y_ptr.dtype.element_ty), inside)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``[T, 2 * width]``, contiguous rows of gates followed by ups, to ``silu(gate) * up`` ``[T, width]``."""
    if not runs_triton(x):
        return reference.silu_and_mul(x)
    rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _silu_and_mul_kernel[(rows, triton.cdiv(width, 1024))](x, y, width, BLOCK=1024, **pdl(x))
    return y
