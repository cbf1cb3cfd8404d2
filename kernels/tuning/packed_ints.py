"""Chooses tiles of products with packed integer weights.

Few rows are bound by reading the weight, so that every SM must read all the time. From some hundreds of rows on a
product by the library, of the weight dequantized into a buffer, costs less than dequantizing in registers does: the
buffer is written and read once, whatever the rows. These are rules: they were derived, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..device import DeviceFacts
from .split_tile import SplitTile

MAX_TILES = 1 << 14
"""Tiles that may be split: each has a counter."""
LARGE_TILE_SHARED_BYTES = 160 << 10
"""Shared memory without which tiles of 128 x 128 would have one step in flight."""
OTHER_SHARED_BYTES = 16 << 10
"""Shared memory of a program that is no step's."""


@dataclass(frozen=True)
class PackedIntNumbers:
    """With ``dequantize_min_rows`` or more the weight is dequantized for the library. ``resident_programs``: four for
    each SM. Splits of fewer than ``min_steps_per_split`` cost more to add up than they spread."""

    dequantize_min_rows: int
    resident_programs: int
    min_steps_per_split: int

    @classmethod
    def derived(cls, facts: DeviceFacts) -> PackedIntNumbers:
        return cls(512, 4 * facts.num_sms, 4)


@dataclass(frozen=True, eq=False)
class PackedIntPolicy:
    facts: DeviceFacts
    numbers: PackedIntNumbers
    batch_invariant: bool = False

    def dequantizes(self, rows: int) -> bool:
        """Says whether the weight is dequantized into a buffer for so many rows."""
        return not self.batch_invariant and rows >= self.numbers.dequantize_min_rows

    def fetches(self, programs: int) -> bool:
        """Says whether programs prefetch their weights: in one that begins later it is only a second read."""
        return not self.batch_invariant and programs <= self.numbers.resident_programs

    @lru_cache(4096)  # noqa: B019 (policies live as long as the process)
    def tile(self, rows: int, out: int, width: int, group: int, itemsize: int, indexed: bool = False) -> SplitTile:
        """The tile of a product of ``rows`` in a type of ``itemsize`` bytes with a weight [out, width]."""
        if self.batch_invariant:
            return self._fitting(64, group, width, itemsize)
        # Scales of each input of each output take the registers of a large tile.
        scales_weights = indexed or group < 64
        tile = self._fitting(min(rows, 64) if scales_weights else rows, group, width, itemsize)
        if scales_weights:
            tile = tile._replace(warps=4)
        tiles, steps, splits = -(-rows // tile.rows) * -(-out // tile.columns), -(-width // tile.depth), 1
        while (2 * splits * tiles <= self.numbers.resident_programs and tiles <= MAX_TILES
               and steps >= 2 * splits * self.numbers.min_steps_per_split):
            splits *= 2
        return tile._replace(splits=splits)

    def expert_tile(self, tokens: int, choices: int, num_experts: int, width: int, group: int,
                    itemsize: int) -> SplitTile:
        """The tile of a grouped product, by the rows that an expert gets; both products go through one alignment, and
        have equal ``rows``. Programs of several experts run at once, so that nothing is split."""
        rows = 32 if self.batch_invariant else -(-tokens * choices // num_experts)
        return self._fitting(min(rows, 64), group, width, itemsize)

    def _fitting(self, rows: int, group: int, width: int, itemsize: int) -> SplitTile:
        """A step stays within a group where groups are of 64 inputs or more: then it has one scale for each output."""
        depth = 128 if group == width or group % 128 == 0 else 64
        if itemsize > 2:
            return SplitTile(16, 32, depth, 1, 4, 2)
        for most, warps, stages in ((8, 2, 6), (16, 2, 6), (32, 2, 4), (64, 4, 4)):
            if rows <= most or (most == 64 and self.facts.shared_bytes < LARGE_TILE_SHARED_BYTES):
                return SplitTile(most, 64, depth, 1, warps, self._stages(most, 64, depth, stages))
        return SplitTile(128, 128, depth, 1, 8, self._stages(128, 128, depth, 3))

    def _stages(self, rows: int, columns: int, depth: int, most: int) -> int:
        """Steps in flight that fit: of rows in 16 bits and values in 8."""
        room = self.facts.shared_bytes - OTHER_SHARED_BYTES
        return max(2, min(most, room // (depth * (columns + 2 * rows))))
