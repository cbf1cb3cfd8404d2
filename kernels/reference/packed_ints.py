"""Twins of products with integer weights, and their packing."""

from __future__ import annotations

import math

import torch

from ..arguments import PackedInts
from .gemm import product

_FP4 = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
TABLES = {
    "nf4": (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    "fp4": (*_FP4, *(-value for value in _FP4))}
"""NF4 (arXiv:2305.14314) and FP4 as bitsandbytes has them: the values by their four bits."""


def quarter_of(group: int, width: int) -> int:
    """Returns how many neighbouring inputs are the same nibble of as many words, for groups of ``group`` of ``width``
    inputs: up to 32, 64 bytes of rows in 16 bits."""
    return math.gcd(group, width, 128) // 4


_ZERO = (1 << 9) - 1


def scale_words(scales: torch.Tensor, zeros: torch.Tensor | int) -> torch.Tensor:
    """Returns ``PackedInts.scales`` of ``scales`` and of ``zeros``, integers of up to 256."""
    words = torch.zeros(scales.shape, dtype=torch.int32, device=scales.device)
    put_scales(words, scales)
    put_zeros(words, zeros)
    return words


def put_scales(words: torch.Tensor, scales: torch.Tensor) -> None:
    """Writes scales, rounded to 14 bits after the point, and leaves the zeros."""
    bits = scales.to(words.device, torch.float32).contiguous().view(torch.int32)
    words.copy_((bits + (_ZERO + 1) // 2 & ~_ZERO) | words & _ZERO)


def put_zeros(words: torch.Tensor, zeros: torch.Tensor | int) -> None:
    """Writes zeros, and leaves the scales."""
    words.copy_(words & ~_ZERO | (zeros.to(words.device, torch.int32) if isinstance(zeros, torch.Tensor) else zeros))


def scales_of(words: torch.Tensor) -> torch.Tensor:
    return (words & ~_ZERO).view(torch.float32)


def zeros_of(words: torch.Tensor) -> torch.Tensor:
    return (words & _ZERO).float()


def pack_ints(values: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Packs uint8 ``[..., in]`` as ``PackedInts`` of such a ``group`` has them: ``[..., in * bits / 8]``."""
    if bits == 8:
        return values
    parts = values.unflatten(-1, (-1, 4, quarter_of(group, values.shape[-1])))
    return torch.stack([parts[..., i, :] | (parts[..., i + 1, :] << 4) for i in (0, 2)], -1).flatten(-3)


def unpack_ints(packed: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """The inverse of ``pack_ints``."""
    if bits == 8:
        return packed
    words = packed.unflatten(-1, (-1, quarter_of(group, 2 * packed.shape[-1]), 2))
    return torch.stack((words & 15, words >> 4), -1).flatten(-2).transpose(-1, -2).flatten(-3)


def dequantize_ints(weight: PackedInts, dtype: torch.dtype, *, sort: bool = True) -> torch.Tensor:
    """Twin of ``gemm.packed_int_matmul.dequantize_ints``: ``[out, in]`` in ``dtype``, of the rows' inputs in their
    order, or without ``sort`` in the weight's."""
    values = unpack_ints(weight.values, weight.bits, weight.group).float()
    if weight.indexed:
        assert weight.order is not None
        groups = weight.order[1].long()
    else:
        groups = torch.arange(weight.width, device=values.device) // weight.group
    words = weight.scales[groups].T
    if weight.table:
        values = torch.tensor(TABLES[weight.table], device=values.device)[values.int()]
    else:
        values = values - zeros_of(words)
    made = (values * scales_of(words)).to(dtype)
    if weight.order is None or not sort:
        return made
    result = torch.empty_like(made)
    result[:, weight.order[0].long()] = made
    return result


def packed_int_matmul(x: torch.Tensor, weight: PackedInts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of ``gemm.packed_int_matmul.packed_int_matmul``: dequantizes, then multiplies, in float32."""
    y = product(x.float(), dequantize_ints(weight, torch.float32))
    return (y if bias is None else y + bias.float()).to(x.dtype)
