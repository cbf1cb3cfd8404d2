"""Quantizes activations to int8, with one float32 scale for each token, or one for all.

An int8 value times its scale is the value. Asymmetric ones have a zero point, which is subtracted first: -128 is then a
token's least value (or zero, where that is less), 127 its greatest.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..arguments import Int8Format, Int8Rows


@triton.jit
def _round(x):
    """To the nearest integer, halves to the even one: a float of this magnitude has no fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize=["x_stride"])
def _int8_quantize_kernel(x_ptr, q_ptr, scale_ptr, shift_ptr, known_scale_ptr, known_shift_ptr, x_stride, width, least,
                          GATED: tl.constexpr, STATIC: tl.constexpr, ASYMMETRIC: tl.constexpr, BLOCK: tl.constexpr,
                          PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + width + column, inside, other=0.0).to(tl.float32)
        # Rounded as silu_and_mul's result is, so that fusing changes no value.
        x = (x / (1.0 + tl.exp(-x)) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    zero = 0.0
    if STATIC:
        scale = tl.load(known_scale_ptr)
        if ASYMMETRIC:
            zero = _round(tl.div_rn(tl.load(known_shift_ptr), scale))
    elif ASYMMETRIC:
        low = tl.minimum(tl.min(x, 0), 0.0)
        scale = tl.maximum(tl.maximum(tl.max(x, 0), 0.0) - low, least) / 255.0
        zero = -128.0 - _round(tl.div_rn(low, scale))
    else:
        scale = tl.maximum(tl.max(tl.abs(x), 0), least) / 127.0
    # Not by the fast division: bfloat16 has few values, and many of them may lie between two integers.
    q = _round(tl.div_rn(x, tl.broadcast_to(scale, x.shape))) + zero
    q = tl.minimum(tl.maximum(q, -128.0), 127.0)
    tl.store(q_ptr + row * width + column, q.to(tl.int8), inside)
    if not STATIC:
        tl.store(scale_ptr + row, scale)
        if ASYMMETRIC:
            tl.store(shift_ptr + row, zero * scale)


def quantize_int8(x: torch.Tensor, form: Int8Format, *, gated: bool = False) -> Int8Rows:
    """Quantizes ``x`` [T, width], contiguous in its last dimension; with ``gated``, ``silu_and_mul(x)`` of ``x`` [T,
    2 * width]. Values beyond a static scale's range saturate."""
    if not runs_triton(x):
        return reference.quantize_int8(reference.silu_and_mul(x) if gated else x, form)
    assert x.stride(-1) == 1
    rows, width = len(x), x.shape[1] // 2 if gated else x.shape[1]
    q = torch.empty((rows, width), dtype=torch.int8, device=x.device)
    scale, shift = form.scale, form.shift
    if scale is None:
        scale = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
        shift = torch.empty_like(scale) if form.asymmetric else None
    if rows:
        block = triton.next_power_of_2(width)
        _int8_quantize_kernel[(rows,)](
            x, q, scale, shift, form.scale, form.shift, x.stride(0), width, reference.INT8_LEAST, GATED=gated,
            STATIC=form.scale is not None, ASYMMETRIC=form.asymmetric, BLOCK=block,
            num_warps=max(1, min(16, block // 512)), **pdl(x))
    return Int8Rows(q, scale, shift, x.dtype)
