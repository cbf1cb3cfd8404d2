"""Twins of products with integer weights, and their packing."""

from __future__ import annotations

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
PARTS, INPUTS = 4, 8
"""32 inputs are packed together, of which each part is a nibble of as many 16-bit words."""


def pack_ints(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs uint8 ``[..., in]`` as ``PackedInts`` has them: ``[..., in * bits / 8]``."""
    if bits == 8:
        return values
    parts = values.unflatten(-1, (-1, PARTS, INPUTS))
    return torch.stack([parts[..., i, :] | (parts[..., i + 1, :] << 4) for i in (0, 2)], -1).flatten(-3)


def unpack_ints(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of ``pack_ints``."""
    if bits == 8:
        return packed
    words = packed.unflatten(-1, (-1, INPUTS, 2))
    return torch.stack((words & 15, words >> 4), -1).flatten(-2).transpose(-1, -2).flatten(-3)


def dequantize_ints(weight: PackedInts, dtype: torch.dtype, *, sort: bool = True) -> torch.Tensor:
    """Twin of ``gemm.packed_int_matmul.dequantize_ints``: ``[out, in]`` in ``dtype``, of the rows' inputs in their
    order, or without ``sort`` in the weight's."""
    values = unpack_ints(weight.values, weight.bits).float()
    if weight.indexed:
        assert weight.order is not None
        groups = weight.order[1].long()
    else:
        groups = torch.arange(weight.width, device=values.device) // weight.group
    if weight.table:
        values = torch.tensor(TABLES[weight.table], device=values.device)[values.int()]
    else:
        values = values - (2 ** (weight.bits - 1) if weight.zeros is None else weight.zeros[groups].float().T)
    made = (values * weight.scales[groups].T).to(dtype)
    if weight.order is None or not sort:
        return made
    result = torch.empty_like(made)
    result[:, weight.order[0].long()] = made
    return result


def packed_int_matmul(x: torch.Tensor, weight: PackedInts, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Twin of ``gemm.packed_int_matmul.packed_int_matmul``: dequantizes, then multiplies, in float32."""
    y = product(x.float(), dequantize_ints(weight, torch.float32))
    return (y if bias is None else y + bias.float()).to(x.dtype)
