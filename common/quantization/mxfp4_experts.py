"""Splits experts in MXFP4, or converts them to bfloat16, which represents all of their values.

A checkpoint stacks a layer's experts, outputs before inputs, packed: ``....mlp.experts.gate_up_proj_blocks``
[E, out, in / 32, 16] uint8, two values of four bits (E2M1) a byte, the lower nibble first, and ``..._scales``
[E, out, in / 32] uint8, the power of two of each block, plus 127. Outputs of gate and up are interleaved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod

import torch

from ...kernels.reference import MXFP4_VALUES
from ..weights.interleaved_experts import deinterleave
from ..weights.lazy import LazyTensor

_NAME = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)_(blocks|scales)")


def unpack(name: str, tensor: LazyTensor, find: Callable[[str], LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """Yields the projections of each expert; scales are read with their blocks, whichever file they are in."""
    if not (match := _NAME.fullmatch(name)):
        yield name, tensor
    elif match[3] == "blocks":
        scales = find(f"{match[1]}.{match[2]}_scales")
        yield from deinterleave(match[1], match[2], "weight",
                                [_Rows(tensor, scales, expert) for expert in range(tensor.get_shape()[0])])


def split(name: str, tensor: LazyTensor, find: Callable[[str], LazyTensor]) -> Iterator[tuple[str, LazyTensor]]:
    """Yields the projections of each expert as they are: ``weight`` [out, in / 2] and ``weight_scale`` [out, in / 32],
    uint8; scales are read with their blocks, whichever file they are in."""
    if not (match := _NAME.fullmatch(name)):
        yield name, tensor
    elif match[3] == "blocks":
        scales = find(f"{match[1]}.{match[2]}_scales")
        for suffix, stack in (("weight", tensor), ("weight_scale", scales)):
            yield from deinterleave(match[1], match[2], suffix,
                                    [_Bytes(stack, expert) for expert in range(tensor.get_shape()[0])])


class _Bytes:
    """One expert's outputs, with all bytes of an output in one dimension."""

    def __init__(self, stack: LazyTensor, expert: int):
        self._stack, self._expert = stack, expert

    def shape(self) -> list[int]:
        _, rows, *columns = self._stack.get_shape()
        return [rows, prod(columns)]

    def dtype(self) -> str:
        return self._stack.get_dtype()

    def read(self, start: int, stop: int, stride: slice) -> torch.Tensor:
        return self._stack[self._expert, start:stop][stride].flatten(1)


class _Rows:
    """One expert's outputs."""

    def __init__(self, blocks: LazyTensor, scales: LazyTensor, expert: int):
        self._blocks, self._scales, self._expert = blocks, scales, expert

    def shape(self) -> list[int]:
        _, rows, blocks, block_bytes = self._blocks.get_shape()
        return [rows, blocks * block_bytes * 2]

    def dtype(self) -> str:
        return "BF16"

    def read(self, start: int, stop: int, stride: slice) -> torch.Tensor:
        return from_mxfp4(*(part[self._expert, start:stop][stride] for part in (self._blocks, self._scales)))


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantizes ``blocks`` [rows, n, 16] and ``scales`` [rows, n], uint8, to bfloat16 ``[rows, n * 32]``."""
    nibbles = torch.tensor(MXFP4_VALUES, dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((nibbles[byte % 16], nibbles[byte // 16]), -1).view(torch.int32)[:, 0]  # one look-up a byte
    values = pairs[blocks.flatten().int()].view(torch.bfloat16).view(*scales.shape, 32)
    return (values * torch.ldexp(torch.ones(scales.shape), scales.int() - 127).bfloat16()[..., None]).flatten(1)
