"""The block types of GGUF files that are computed with, as ggml lays them out. It imports no torch.

A row of a matrix is a sequence of blocks, each with scales for its values (ggml's ``ggml-common.h``).
"""

from __future__ import annotations

from typing import NamedTuple


class BlockType(NamedTuple):
    """``number`` is ggml's; a block has ``values`` values in ``num_bytes`` bytes, and a scale for each ``group`` of
    them."""

    number: int
    values: int
    num_bytes: int
    group: int

    def row_bytes(self, width: int) -> int:
        """Returns the bytes of a row of ``width`` values, a multiple of ``values``."""
        return width // self.values * self.num_bytes


BLOCKS = {
    "Q4_0": BlockType(2, 32, 18, 32), "Q4_1": BlockType(3, 32, 20, 32), "Q5_0": BlockType(6, 32, 22, 32),
    "Q5_1": BlockType(7, 32, 24, 32), "Q8_0": BlockType(8, 32, 34, 32), "Q2_K": BlockType(10, 256, 84, 16),
    "Q3_K": BlockType(11, 256, 110, 16), "Q4_K": BlockType(12, 256, 144, 32), "Q5_K": BlockType(13, 256, 176, 32),
    "Q6_K": BlockType(14, 256, 210, 16)}
"""The quantized types, by their names."""
