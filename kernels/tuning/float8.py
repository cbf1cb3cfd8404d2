"""Chooses tiles of float8 products, as measured on an H200 with Llama-3-8B's layers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..arguments import By
from ..device import DeviceFacts
from .split_tile import SplitTile

ALL_ROWS = 1 << 31


@dataclass(frozen=True)
class Float8Numbers:
    """With more than ``max_rows`` the library's products are faster. ``resident_programs``: two for each SM. Splits of
    fewer than ``min_steps_per_split`` cost more to add up than they spread. ``wide_columns`` need no splits."""

    max_rows: int
    resident_programs: int
    min_steps_per_split: int
    wide_columns: int

    @classmethod
    def derived(cls, facts: DeviceFacts) -> Float8Numbers:
        """The rule for a GPU without measured numbers."""
        return cls(128, 2 * facts.num_sms, 16, 16384)


@dataclass(frozen=True, eq=False)
class Float8Policy:
    facts: DeviceFacts
    numbers: Float8Numbers
    batch_invariant: bool = False

    @property
    def max_rows(self) -> int:
        """The most rows that our kernels take; the library takes products of more."""
        return ALL_ROWS if self.batch_invariant else self.numbers.max_rows

    @lru_cache(4096)  # noqa: B019 (policies live as long as the process)
    def tile(self, by: By, rows: int, out: int, width: int) -> SplitTile:
        """Few rows: narrow columns and splits, so that every SM reads weights. Many: three programs share an SM, of
        which one scales its sums while the others multiply."""
        if self.batch_invariant or rows > self.numbers.max_rows:
            return SplitTile(64, 128, 128, 1, 4, 3)
        if rows > 64:
            return self._split(SplitTile(128, 64, 128, 1, 4, 4), out, width)
        if out > self.numbers.wide_columns:
            return SplitTile(64, 128, 128, 1, 4, 4)
        if by == "row":
            return self._split(SplitTile(64, 32, 256, 1, 4, 4), out, width)
        return self._split(SplitTile(64, 64, 128, 1, 4, 6), out, width)

    def _split(self, tile: SplitTile, out: int, width: int) -> SplitTile:
        numbers, tiles, steps, splits = self.numbers, -(-out // tile.columns), -(-width // tile.depth), 1
        while 2 * splits * tiles <= numbers.resident_programs and steps >= 2 * splits * numbers.min_steps_per_split:
            splits *= 2
        return tile._replace(splits=splits)
