"""Fuses root-mean-square norm, and the residual addition before it, with quantizing the result to float8.

A layer whose weights are float8 then reads its input from memory once, and has one launch less.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..arguments import Float8Format, Float8Rows
from .fp8_quantize import allocate_rows, quantize, scales_of, to_float8


# A scale's stride may be the number of rows, which changes with every step.
@triton.jit(do_not_specialize=["scale_row", "scale_group"])
def _fp8_rmsnorm_kernel(x_ptr, residual_ptr, sum_ptr, q_ptr, scale_ptr, weight_ptr, eps, x_stride, scale_row,
                        scale_group, width, group, groups, largest, least, HAS_RESIDUAL: tl.constexpr,
                        STATIC: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    member = tl.arange(0, BLOCK_GROUPS)
    within = tl.arange(0, BLOCK)
    columns = member[:, None] * group + within[None, :]
    inside = (within < group)[None, :] & (columns < width)
    start_next(PDL)
    weight = tl.load(weight_ptr + columns, inside, other=0.0)
    wait_for_last(PDL)
    x = tl.load(x_ptr + row * x_stride + columns, inside, other=0.0)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * width + columns, inside, other=0.0)
        tl.store(sum_ptr + row * width + columns, x, inside)
    wide = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / width + eps)
    # Rounded as rmsnorm's result is, so that fusing changes no value.
    normed = ((wide * factor).to(weight.dtype) * weight).to(tl.float32)
    if STATIC:
        scale = tl.zeros((BLOCK_GROUPS,), tl.float32) + tl.load(scale_ptr)
    else:
        scale = scales_of(normed, largest, least)
        tl.store(scale_ptr + row * scale_row + member * scale_group, scale, member < groups)
    tl.store(q_ptr + row * width + columns, to_float8(normed, scale, largest, q_ptr.dtype.element_ty), inside)


def fp8_rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: Float8Format,
                residual: torch.Tensor | None = None) -> tuple[Float8Rows, torch.Tensor]:
    """``(quantize(normed, form), total)`` of ``rmsnorm``'s results ``(normed, total)``. ``x`` is ``[T, width]``."""
    if not runs_triton(x):
        normed, total = reference.rmsnorm(x, weight, eps, residual)
        return quantize(normed, form), total
    rows, width = x.shape
    group = min(form.group, width) if form.known is None else width
    groups = triton.cdiv(width, group)
    q, scale, _ = made = allocate_rows(x, width, group)
    if form.known is not None:
        made = made._replace(scale=form.known)
    total = torch.empty_like(x, memory_format=torch.contiguous_format) if residual is not None else x
    if rows:
        block = triton.next_power_of_2(group)
        block_groups = triton.next_power_of_2(groups)
        _fp8_rmsnorm_kernel[(rows,)](
            x, residual, total, q, made.scale, weight, eps, x.stride(0), *scale.stride(), width, group, groups,
            reference.FP8_LARGEST, reference.FP8_LEAST, HAS_RESIDUAL=residual is not None,
            STATIC=form.known is not None, BLOCK_GROUPS=block_groups, BLOCK=block,
            num_warps=max(1, min(16, block * block_groups // 512)), **pdl(x))
    return made, total
