"""MXFP4: packing as the kernels take it, and the twin of experts in it."""

from __future__ import annotations

import torch

from ..arguments import ExpertBiases, Mxfp4Weights
from ..gated_activation import GateActivation
from .moe import gated_experts

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
"""The values (E2M1) by their four bits."""
_BIAS = 221
"""A weight is an E2M1 value times 2**(scale - 221), see ``Mxfp4Weights``: 127 for the exponent of a float, 126 for the
values' own bits, which are those of a subnormal, less 32. Scales of up to 2**33 fit."""


MXFP4_MIN_WORDS = 16
"""Words of 16 bits that a product takes at once, at least."""
_PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14))
"""Bits of a word of 16 in which the bits of its values are, from each value's lowest on."""


def pack_mxfp4(blocks: torch.Tensor, group: int) -> torch.Tensor:
    """Packs ``blocks`` [out, in / 2] uint8, two neighbouring values a byte, the first in its lower bits, as
    ``Mxfp4Weights`` of one expert."""
    values = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % mxfp4_block(group)))
    values = values.unflatten(1, (-1, 4, group))
    tables = torch.tensor([[sum((value >> bit & 1) << place for bit, place in enumerate(places)) for value in range(16)]
                           for places in _PLACES], dtype=torch.int32, device=blocks.device)
    words = torch.stack([tables[i][values[:, :, i].int()] for i in range(4)]).sum(0)
    return torch.stack((words & 255, words >> 8), -1).to(torch.uint8).flatten(1)


def mxfp4_block(group: int) -> int:
    """Inputs of which an output has whole multiples: of four groups, and what a step of the kernel takes."""
    return 4 * max(group, MXFP4_MIN_WORDS)


def unpack_mxfp4(packed: torch.Tensor, group: int) -> torch.Tensor:
    """The four bits of each value of ``packed`` [..., out, bytes], uint8 [..., out, groups, group]."""
    pairs = packed.unflatten(-1, (-1, group, 2)).int()
    words = pairs[..., 0] | pairs[..., 1] << 8  # [..., out, quads, group]
    return torch.stack([sum((words >> place & 1) << bit for bit, place in enumerate(places)) for places in _PLACES],
                       -2).flatten(-3, -2)


def pack_mxfp4_scales(scales: torch.Tensor, group: int) -> torch.Tensor:
    """Packs ``scales`` [out, in / group] uint8, exponents plus 127, as ``Mxfp4Weights`` of one expert: [groups / 4,
    out, 4]."""
    biased = (scales.int() + (_BIAS - 127)).clamp(max=254).to(torch.uint8)
    padded = torch.nn.functional.pad(biased, (0, -scales.shape[1] % (mxfp4_block(group) // group)))
    return padded.unflatten(1, (-1, 4)).transpose(0, 1)


def dequantize_mxfp4(weights: Mxfp4Weights) -> torch.Tensor:
    """Dequantizes stacks of matrices, or one, to float32 ``[..., out, in]``, and zeros that fill the last block."""
    packed, scale, group = weights
    table = torch.tensor(MXFP4_VALUES, device=packed.device)
    values = table[unpack_mxfp4(packed, group)]
    exponents = scale.transpose(-3, -2).flatten(-2).int() - _BIAS
    factor = torch.ldexp(torch.ones(exponents.shape, device=packed.device), exponents)
    return (values * factor[..., None]).flatten(-2)


def mxfp4_experts(x: torch.Tensor, gate_up: Mxfp4Weights, down: Mxfp4Weights, topk_ids: torch.Tensor,
                  weights: torch.Tensor, biases: ExpertBiases | None = None, limit: float = 0.0,
                  activate: GateActivation | None = None) -> torch.Tensor:
    """Twin of ``moe.mxfp4_experts.mxfp4_experts``: of experts that have a token, one dense matrix at a time."""
    def product(rows: torch.Tensor, stack: Mxfp4Weights, expert: int) -> torch.Tensor:
        dense = dequantize_mxfp4(Mxfp4Weights(stack.packed[expert], stack.scale[expert], stack.group))
        return (rows.float() @ dense[:, :rows.shape[1]].T).to(rows.dtype)

    return gated_experts(x, len(gate_up.packed), topk_ids, weights, lambda rows, expert: product(rows, gate_up, expert),
                         lambda rows, expert: product(rows, down, expert), biases, limit, activate)
