"""Twins of kernels of int8."""

from __future__ import annotations

import torch

from ..arguments import Int8Format, Int8Rows

INT8_LEAST = 1e-12
"""The smallest magnitude that a scale is made for: a token of zeros has a scale too."""


def quantize_int8(x: torch.Tensor, form: Int8Format) -> Int8Rows:
    """Twin of ``rowwise.int8_quantize.quantize_int8``."""
    wide = x.float()
    zero: torch.Tensor | float = 0.0
    scale, shift = form.scale, form.shift
    if scale is not None:
        zero = 0.0 if shift is None else (shift / scale).round()
    elif form.asymmetric:
        low = wide.amin(-1, keepdim=True).clamp(max=0)
        scale = (wide.amax(-1, keepdim=True).clamp(min=0) - low).clamp(min=INT8_LEAST) / 255
        zero = -128 - (low / scale).round()
        shift = zero * scale
    else:
        scale = wide.abs().amax(-1, keepdim=True).clamp(min=INT8_LEAST) / 127
    q = ((wide / scale).round() + zero).clamp(-128, 127).to(torch.int8)
    return Int8Rows(q, scale, shift, x.dtype)


def int8_matmul(rows: Int8Rows, weight: torch.Tensor, weight_scale: torch.Tensor,
                sums: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of ``int8.int8_matmul.int8_matmul``. Sums in float64 are exact, as those of int32 are."""
    y = (rows.values.double() @ weight.double().T).float() * rows.scale * weight_scale
    return (y if rows.shift is None or sums is None else y - rows.shift.view(-1, 1) * sums).to(rows.dtype)
