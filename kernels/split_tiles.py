"""How products of 65 to 256 rows are shared out among a Hopper GPU's multiprocessors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SplitTile:
    """A tile is at most ``rows`` rows by ``groups`` times ``height`` of the weight's, in steps of ``depth``, of which
    ``stages`` are on their way. With ``pieces`` each tile is so many programs' work, that are then as many as tiles
    times pieces; without, ``programs`` have equal shares of all, each of a tile or more."""

    rows: int
    groups: int
    height: int
    depth: int
    stages: int
    pieces: int = 1
    programs: int = 132

    @property
    def high(self) -> int:
        """Of the weight's rows."""
        return self.groups * self.height

    @property
    def chunk(self) -> int:
        """Rows that are stored at a time."""
        return 64 if self.pieces <= self.rows // 64 else 32
