"""Quantizes activations to float8 (e4m3), with one float32 scale for each token, for groups of its values, or for all.

A float8 value times its scale is the value. 448 is the largest float8; a scale maps the largest magnitude to it.

``gated`` inputs are what ``silu_and_mul`` takes, ``[T, 2 * width]``: its result is quantized without being written to
memory.
"""

from __future__ import annotations

import torch

from .. import reference
from .._triton import pdl, runs_triton, start_next, tl, triton, wait_for_last
from ..arguments import Float8Format, Float8Rows

_TILE = 1024  # values of one program where groups are smaller


@triton.jit
def scales_of(x, largest, least):
    """The scales ``[groups]`` of ``x`` [groups, values]."""
    return tl.maximum(tl.max(tl.abs(x), 1), least) / largest


@triton.jit
def to_float8(x, scale, largest, dtype: tl.constexpr):
    """Divides ``x`` [groups, values] by ``scale`` [groups] and casts it."""
    q = x / scale[:, None]
    # Not all casts saturate: beyond the largest value some give NaN.
    return tl.minimum(tl.maximum(q, -largest), largest).to(dtype)


# A scale's stride may be the number of rows, which changes with every step.
@triton.jit(do_not_specialize=["scale_row", "scale_group"])
def _quantize_kernel(x_ptr, q_ptr, scale_ptr, x_stride, scale_row, scale_group, width, group, groups, largest, least,
                     GATED: tl.constexpr, STATIC: tl.constexpr, BLOCK_GROUPS: tl.constexpr, BLOCK: tl.constexpr,
                     PDL: tl.constexpr):
    start_next(PDL)
    wait_for_last(PDL)
    row = tl.program_id(0).to(tl.int64)
    member = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    within = tl.arange(0, BLOCK)
    columns = member[:, None] * group + within[None, :]
    inside = (within < group)[None, :] & (columns < width)
    x = tl.load(x_ptr + row * x_stride + columns, inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + width + columns, inside, other=0.0).to(tl.float32)
        # Rounded as silu_and_mul's result is, so that fusing changes no value.
        x = (x / (1.0 + tl.exp(-x)) * up).to(x_ptr.dtype.element_ty).to(tl.float32)
    if STATIC:
        scale = tl.zeros((BLOCK_GROUPS,), tl.float32) + tl.load(scale_ptr)
    else:
        scale = scales_of(x, largest, least)
        tl.store(scale_ptr + row * scale_row + member * scale_group, scale, member < groups)
    tl.store(q_ptr + row * width + columns, to_float8(x, scale, largest, q_ptr.dtype.element_ty), inside)


def quantize(x: torch.Tensor, form: Float8Format, *, gated: bool = False) -> Float8Rows:
    """Quantizes ``x`` [T, width], contiguous in its last dimension. Values beyond a static scale's range saturate."""
    if form.known is not None:
        return Float8Rows(quantize_by(x, form.known, gated=gated), form.known, x.dtype)
    made = allocate_rows(x, _width(x, gated), form.group)
    _quantize_into(made.values, made.scale, x, form.group, gated=gated)
    return made


def allocate_rows(x: torch.Tensor, width: int, group: int) -> Float8Rows:
    """Allocates rows for those of ``x``, uninitialised, and up to three more after the last: libraries take rows by
    fours."""
    rows, whole, groups = len(x), -(-len(x) // 4) * 4, -(-width // group)
    values = torch.empty((whole, width), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((groups, whole), dtype=torch.float32, device=x.device)
    return Float8Rows(values[:rows], scale[:, :rows].t(), x.dtype)


def quantize_tokens(x: torch.Tensor, *, gated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``x`` [T, width], contiguous in its last dimension, to float8 and float32 scales [T, 1]."""
    return quantize_groups(x, _width(x, gated), gated=gated)


def quantize_groups(x: torch.Tensor, group: int, *, gated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes ``x`` [T, width] to float8 and contiguous scales [T, ceil(width / group)]; a last group may be
    smaller."""
    width = _width(x, gated)
    q = torch.empty((len(x), width), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((len(x), -(-width // group)), dtype=torch.float32, device=x.device)
    _quantize_into(q, scale, x, group, gated=gated)
    return q, scale


def quantize_by(x: torch.Tensor, scale: torch.Tensor, *, gated: bool = False) -> torch.Tensor:
    """Quantizes ``x`` [T, width] to float8 by a static scale, float32 [1]; values beyond its range saturate."""
    if not runs_triton(x):
        return reference.quantize_by(reference.silu_and_mul(x) if gated else x, scale)
    width = _width(x, gated)
    q = torch.empty((x.shape[0], width), dtype=torch.float8_e4m3fn, device=x.device)
    _launch(x, q, scale, (0, 0), min(_TILE, width), triton.cdiv(width, _TILE), gated=gated, static=True)
    return q


def _quantize_into(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, group: int, *, gated: bool) -> None:
    """Fills ``q`` [T, width] and ``scale`` [T, groups], which may have any strides."""
    if runs_triton(x):
        _launch(x, q, scale, scale.stride(), group, scale.shape[1], gated=gated, static=False)
        return
    values, scales = reference.quantize_groups(reference.silu_and_mul(x) if gated else x, group)
    q.copy_(values)
    scale.copy_(scales)


def _width(x: torch.Tensor, gated: bool) -> int:
    return x.shape[1] // 2 if gated else x.shape[1]


def _launch(x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, strides: tuple[int, ...], group: int, groups: int, *,
            gated: bool, static: bool) -> None:
    assert x.stride(-1) == 1
    if not x.shape[0]:
        return
    block = triton.next_power_of_2(group)
    block_groups = max(1, min(triton.next_power_of_2(groups), _TILE // block))
    _quantize_kernel[(x.shape[0], triton.cdiv(groups, block_groups))](
        x, q, scale, x.stride(0), *strides, q.shape[1], group, groups, reference.FP8_LARGEST, reference.FP8_LEAST,
        GATED=gated, STATIC=static, BLOCK_GROUPS=block_groups, BLOCK=block,
        num_warps=max(1, min(16, block * block_groups // 512)), **pdl(x))
