"""Chooses tiles of the grouped products of experts: measured ones where the device's file has them, else by a rule.

``python -m baton.tests.bench.tune_moe`` measures them: by the layer's shape, then by the number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ..device import DeviceFacts


@dataclass(frozen=True)
class Tile:
    """One program's part of a product, ``rows`` x ``columns`` by steps of ``depth``; programs go through ``band`` row
    blocks before the next columns.

    Tiles of 12 ``warps`` are those of moe_warp_specialized.py, where 4 warps only load; their rows are blocks of 64, as
    many as an expert has, ``rows`` at most."""

    rows: int
    columns: int
    depth: int
    band: int
    warps: int
    stages: int

    @property
    def is_warp_specialized(self) -> bool:
        return self.warps == 12

    @property
    def block(self) -> int:
        """Rows of a block of the alignment that it goes through."""
        return 64 if self.is_warp_specialized else self.rows

    @property
    def max_blocks(self) -> int:
        """Blocks that it may have, where it may have several; else 0."""
        return self.rows // 64 if self.is_warp_specialized else 0


@dataclass(frozen=True)
class Tiles:
    """The tiles of a layer's two products; both go through one alignment, so that ``rows`` are equal. ``sorted``: rows
    stay in the order of experts between them (moe_sorted.py), which pays from some dozens of rows an expert on."""

    gate_up: Tile
    down: Tile
    sorted: bool = False

    def __post_init__(self) -> None:
        assert self.gate_up.rows == self.down.rows
        assert self.gate_up.is_warp_specialized == self.down.is_warp_specialized

    @property
    def is_warp_specialized(self) -> bool:
        return self.gate_up.is_warp_specialized


MeasuredTiles = Mapping[str, Mapping[int, Tiles]]
"""By ``shape_key``, then by the number of tokens."""


def shape_key(num_experts: int, hidden: int, size: int, choices: int, dtype: torch.dtype) -> str:
    """A layer's name in a device's file: its experts on this rank, hidden size, one expert's intermediate size on this
    rank, and experts a token."""
    return f"experts={num_experts},hidden={hidden},size={size},choices={choices},{str(dtype).removeprefix('torch.')}"


def warp_specialized_tiles(dtype: torch.dtype, band: int = 4) -> Tiles:
    """The only ones that moe_warp_specialized.py has, but for their ``band``."""
    depth = 128 // dtype.itemsize
    return Tiles(Tile(128, 128, depth, band, 12, 4), Tile(128, 256, depth, band, 12, 4), True)


def default_tiles(rows_each: float, dtype: torch.dtype) -> Tiles:
    """Tiles by the rows that an expert gets. Few: the weights are read once whatever the tile, by many programs. Many:
    as much reuse as registers allow; the gated product holds two tiles. Both fit an A100's shared memory."""
    if rows_each <= 32 or dtype == torch.float32:
        rows = next(rows for rows in (16, 32, 64) if rows_each <= rows or rows == 64)
        depth = 128 if dtype.itemsize <= 2 else 32
        return Tiles(Tile(rows, 64, depth, 1, 4, 3), Tile(rows, 128, depth, 1, 4, 3))
    if dtype.itemsize == 1:  # by blocks, there is a product as well as each sum that it is scaled into
        return Tiles(Tile(64, 64, 128, 8, 4, 3), Tile(64, 128, 128, 8, 4, 3), True)
    return Tiles(Tile(128, 128, 64, 4, 8, 3), Tile(128, 128, 64, 4, 8, 3), True)


@dataclass(frozen=True)
class MoENumbers:
    """``warp_specialized_min_rows`` of an expert, from which on the rule takes warp-specialized products: a layer of
    Qwen3-30B-A3B with half of its experts takes 222 us for 512 tokens by the others and 181 by these, in float8 159 and
    119."""

    warp_specialized_min_rows: int = 32
    tiles: MeasuredTiles = field(default_factory=dict)

    @classmethod
    def derived(cls, facts: DeviceFacts) -> MoENumbers:
        return cls()


@dataclass(frozen=True, eq=False)
class MoEPolicy:
    facts: DeviceFacts
    numbers: MoENumbers
    batch_invariant: bool = False

    @lru_cache(4096)  # noqa: B019 (policies live as long as the process)
    def tiles(self, tokens: int, num_experts: int, hidden: int, size: int, choices: int, dtype: torch.dtype,
              warp_specialized: bool = False) -> Tiles:
        """Returns the tiles measured with the nearest number of tokens, or the rule's. ``warp_specialized``: those
        products can compute this layer here."""
        if self.batch_invariant:
            return default_tiles(32, dtype)
        measured = self.numbers.tiles.get(shape_key(num_experts, hidden, size, choices, dtype))
        if measured:
            nearest = measured[min(measured, key=lambda known: abs(known - tokens))]
            if warp_specialized or not nearest.is_warp_specialized:
                return nearest
        rows_each = tokens * choices / num_experts
        if warp_specialized and rows_each >= self.numbers.warp_specialized_min_rows:
            return warp_specialized_tiles(dtype)
        return default_tiles(rows_each, dtype)


def tiles_from_json(content: Mapping[str, Mapping[str, Any]]) -> MeasuredTiles:
    return {shape: {int(tokens): Tiles(Tile(**tiles["gate_up"]), Tile(**tiles["down"]), tiles.get("sorted", False))
                    for tokens, tiles in by_tokens.items()}
            for shape, by_tokens in content.items()}


def tiles_to_json(measured: MeasuredTiles) -> dict[str, Any]:
    """Plain values of JSON, in order."""
    return {shape: {str(tokens): asdict(tiles) for tokens, tiles in sorted(by_tokens.items())}
            for shape, by_tokens in sorted(measured.items())}
