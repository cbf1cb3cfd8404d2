"""Chooses tiles of products with packed integer weights.

Few rows are bound by reading the weight, so that every SM must read all the time: many small programs do, each with
little on its way. With more rows a program takes more outputs, for it reads all rows. From some dozens of rows on a
product by the library, of the weight dequantized into a buffer, costs less than dequantizing in registers does: the
buffer is written and read once, whatever the rows. The numbers were measured on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..device import DeviceFacts
from .split_tile import SplitTile

MAX_TILES = 1 << 14
"""Tiles that may be split: each has a counter."""
FEW_ROWS = 16
"""Tiles of more rows are split less: what is added up grows with the rows."""
OTHER_SHARED_BYTES = 16 << 10
"""Shared memory of a program that is no step's."""


@dataclass(frozen=True)
class PackedIntNumbers:
    """With ``dequantize_min_rows`` or more the weight is dequantized for the library. Splits make programs of up to
    ``resident_warps`` warps together, sixteen for each SM. Splits of fewer than ``min_steps_per_split`` cost more to
    add up than they spread. Weights of up to ``fetched_bytes`` are prefetched while the kernel before runs; larger ones
    come no sooner."""

    dequantize_min_rows: int
    resident_warps: int
    min_steps_per_split: int
    fetched_bytes: int

    @classmethod
    def derived(cls, facts: DeviceFacts) -> PackedIntNumbers:
        return cls(65, 16 * facts.num_sms, 2, 16 << 20)


@dataclass(frozen=True, eq=False)
class PackedIntPolicy:
    facts: DeviceFacts
    numbers: PackedIntNumbers
    batch_invariant: bool = False

    def dequantizes(self, rows: int) -> bool:
        """Says whether the weight is dequantized into a buffer for so many rows."""
        return not self.batch_invariant and rows >= self.numbers.dequantize_min_rows

    def fetches(self, warps: int, num_bytes: int) -> bool:
        """Says whether programs of so many warps together prefetch their part of ``num_bytes`` of weights: in one that
        begins later it is only a second read."""
        return (not self.batch_invariant and warps <= self.numbers.resident_warps
                and num_bytes <= self.numbers.fetched_bytes)

    @lru_cache(4096)  # noqa: B019 (policies live as long as the process)
    def tile(self, rows: int, out: int, width: int, group: int, itemsize: int, indexed: bool = False,
             bits: int = 4) -> SplitTile:
        """The tile of a product of ``rows`` in a type of ``itemsize`` bytes with a weight [out, width]."""
        scales_weights = indexed or group < 64
        if self.batch_invariant:
            return self._fitting(64, group, width, itemsize, scales_weights, bits)
        tile = self._fitting(rows, group, width, itemsize, scales_weights, bits)
        most = 16 if tile.rows < FEW_ROWS or (tile.rows == FEW_ROWS and bits == 4) else 8
        tiles, steps, splits = -(-rows // tile.rows) * -(-out // tile.columns), -(-width // tile.depth), 1
        while (2 * splits <= most and 2 * splits * tiles * tile.warps <= self.numbers.resident_warps
               and tiles <= MAX_TILES and steps >= 2 * splits * self.numbers.min_steps_per_split):
            splits *= 2
        return tile._replace(splits=splits)

    def expert_tile(self, tokens: int, choices: int, num_experts: int, width: int, group: int, itemsize: int,
                    bits: int = 4) -> SplitTile:
        """The tile of a grouped product, by twice the rows that an expert gets on average; both products go through one
        alignment, and have equal ``rows``. Programs of several experts run at once, so that nothing is split."""
        rows = 32 if self.batch_invariant else 2 * tokens * choices // num_experts
        return self._fitting(min(rows, 64), group, width, itemsize, group < 64, bits)

    def _fitting(self, rows: int, group: int, width: int, itemsize: int, scales_weights: bool, bits: int) -> SplitTile:
        """A step stays within a group where groups are of 64 inputs or more: then it has one scale for each output.
        Scales of each input take the registers of a larger tile (``scales_weights``)."""
        depth = 128 if group == width or group % 128 == 0 else 64
        if itemsize > 2:
            return SplitTile(16, 32, depth, 1, 4, 2)
        fit = next(most for most in (8, 16, 32, 64) if rows <= most or most == 64)
        if scales_weights:
            return SplitTile(fit, 64, depth, 1, 4, self._stages(fit, 64, depth, 4))
        if fit == 8 or (fit == 16 and bits == 8):
            return SplitTile(fit, 64, depth, 1, 2, self._stages(fit, 64, depth, 5 if bits == 4 else 4))
        stages = self._stages(fit, 128, depth, 3)
        return SplitTile(fit, 128, depth, 1, 8 if fit == 64 else 4, stages)

    def _stages(self, rows: int, columns: int, depth: int, most: int) -> int:
        """Steps in flight that fit: of rows in 16 bits and values in 8."""
        room = self.facts.shared_bytes - OTHER_SHARED_BYTES
        return max(2, min(most, room // (depth * (columns + 2 * rows))))
