"""The gated activation of MLPs whose gates are GELUs, as Gemma's."""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last


@triton.jit
def _gelu_and_mul_kernel(x_ptr, y_ptr, width, TANH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(x_ptr + row * 2 * width + columns, inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * width + width + columns, inside, other=0.0).to(tl.float32)
    if TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        share = 1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner))  # (1 + tanh(inner)) / 2
    else:
        share = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    tl.store(y_ptr + row * width + columns, (gate * share * up).to(y_ptr.dtype.element_ty), inside)


def gelu_and_mul(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """``[T, 2 * width]``, contiguous rows of gates followed by ups, to ``gelu(gate) * up`` ``[T, width]``; with
    ``tanh`` the GELU's approximation by tanh (arXiv:1606.08415)."""
    if not runs_triton(x):
        return reference.gelu_and_mul(x, tanh)
    rows, width = x.shape[0], x.shape[1] // 2
    y = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        _gelu_and_mul_kernel[(rows, triton.cdiv(width, 1024))](x, y, width, TANH=tanh, BLOCK=1024, **pdl(x))
    return y
