"""Twin of the kernels that read GGUF's quantized blocks."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..gguf_blocks import BLOCKS


class _Bits(NamedTuple):
    """Where the bits of a block's 32 or 256 values are: of value ``j``, ``byte[j] >> shift[j] & mask``."""

    byte: list[int]
    shift: list[int]
    mask: int

    def of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Returns the bits of ``blocks`` [B, bytes] as int32 [B, values]."""
        shift = torch.tensor(self.shift, dtype=torch.int32, device=blocks.device)
        return (blocks[:, self.byte].to(torch.int32) >> shift) & self.mask


def _halves(start: int) -> _Bits:
    """Four bits of 32 values: the first 16 in the low halves of 16 bytes, the others in the high ones."""
    return _Bits([start + j % 16 for j in range(32)], [j // 16 * 4 for j in range(32)], 15)


def _bit_each(start: int) -> _Bits:
    """The fifth bits of 32 values, in order."""
    return _Bits([start + j // 8 for j in range(32)], [j % 8 for j in range(32)], 1)


def _nibbles(start: int, run: int) -> _Bits:
    """Four bits of 256 values: of 2 * ``run`` values the first half is in the low halves of ``run`` bytes."""
    return _Bits([start + j // (2 * run) * run + j % run for j in range(256)], [j // run % 2 * 4 for j in range(256)],
                 15)


def _pairs(start: int) -> _Bits:
    """Two bits of 256 values: 128 in 32 bytes, the first 32 in the lowest bits of each."""
    return _Bits([start + j // 128 * 32 + j % 32 for j in range(256)], [j % 128 // 32 * 2 for j in range(256)], 3)


def _planes(start: int) -> _Bits:
    """One bit of 256 values in 32 bytes, the first 32 in the lowest bit of each."""
    return _Bits([start + j % 32 for j in range(256)], [j // 32 for j in range(256)], 1)


_LOW = {"Q4_0": _halves(2), "Q4_1": _halves(4), "Q5_0": _halves(6), "Q5_1": _halves(8), "Q2_K": _pairs(16),
        "Q3_K": _pairs(32), "Q4_K": _nibbles(16, 32), "Q5_K": _nibbles(48, 32), "Q6_K": _nibbles(0, 64)}
_HIGH = {"Q5_0": (_bit_each(2), 4), "Q5_1": (_bit_each(4), 4), "Q3_K": (_planes(0), 2), "Q5_K": (_planes(16), 4),
         "Q6_K": (_pairs(128), 4)}
"""The bits above those of ``_LOW``, and how many are below them."""
_OFFSET = {"Q4_0": 8, "Q5_0": 16, "Q3_K": 4, "Q6_K": 32}


def dequantize_gguf(packed: torch.Tensor, kind: str) -> torch.Tensor:
    """Returns ``[rows, values]`` float32 of ``packed`` [rows, bytes] uint8, whole blocks of the type ``kind``."""
    block = BLOCKS[kind]
    rows, blocks = len(packed), packed.reshape(-1, block.num_bytes)
    if kind == "Q8_0":
        values = blocks[:, 2:].contiguous().view(torch.int8).float()
    else:
        whole = _LOW[kind].of(blocks)
        if kind in _HIGH:
            bits, below = _HIGH[kind]
            whole = whole + (bits.of(blocks) << below)
        values = (whole - _OFFSET.get(kind, 0)).float()
    scale, minimum = _scales(blocks, kind)
    grouped = values.view(len(blocks), -1, block.group) * scale[:, :, None]
    if minimum is not None:
        grouped = grouped - minimum[:, :, None]
    return grouped.reshape(rows, -1)


def _scales(blocks: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the scale, and what is subtracted, of each group of ``blocks``: ``[B, groups]`` float32."""
    if kind in ("Q4_0", "Q5_0", "Q8_0"):
        return _half(blocks, 0), None
    if kind in ("Q4_1", "Q5_1"):
        return _half(blocks, 0), -_half(blocks, 2)
    if kind in ("Q4_K", "Q5_K"):
        first, second, rest = (blocks[:, start:start + 4].to(torch.int32) for start in (4, 8, 12))
        scale = torch.cat((first & 63, rest & 15 | first >> 6 << 4), 1)
        minimum = torch.cat((second & 63, rest >> 4 | second >> 6 << 4), 1)
        return _half(blocks, 0) * scale.float(), _half(blocks, 2) * minimum.float()
    if kind == "Q6_K":
        return _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float(), None
    if kind == "Q2_K":
        both = blocks[:, :16].to(torch.int32)
        return _half(blocks, 80) * (both & 15).float(), _half(blocks, 82) * (both >> 4).float()
    low, high = blocks[:, 96:104].to(torch.int32), blocks[:, 104:108].to(torch.int32)
    whole = torch.cat((low & 15, low >> 4), 1) + (torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 1) << 4)
    return _half(blocks, 108) * (whole - 32).float(), None


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Returns a block's float16 at a byte, ``[B, 1]`` float32."""
    return blocks[:, start:start + 2].contiguous().view(torch.float16).float()
