"""Tile sizes of the grouped products: measured ones where a table has them, else by a rule.

Tables are ``tuning/moe/{device name}.json``, written by ``python -m baton.tests.bench.tune_moe``: by the layer's shape,
then by the number of tokens.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[1] / "tuning" / "moe"
WARPGROUPS_FROM = 32
"""Rows an expert from which on the rule takes products by warps with roles: a layer of Qwen3-30B-A3B's halved experts
takes 222 us for 512 tokens by the others and 181 by these, in float8 159 and 119."""


@dataclass(frozen=True)
class Tile:
    """One program's part of a product, ``rows`` x ``columns`` by steps of ``depth``; ``band`` row blocks in turn.

    Of 12 ``warps``, which moe_warpgroups.py's programs have, 4 only load; their rows are blocks of 64, as many as a
    place has, ``rows`` at most."""

    rows: int
    columns: int
    depth: int
    band: int
    warps: int
    stages: int

    @property
    def by_warpgroups(self) -> bool:
        return self.warps == 12

    @property
    def block(self) -> int:
        """Rows of a block of the alignment that it goes through."""
        return 64 if self.by_warpgroups else self.rows

    @property
    def tall(self) -> int:
        """Blocks that it may have, where it may have several; else 0."""
        return self.rows // 64 if self.by_warpgroups else 0


@dataclass(frozen=True)
class Tiles:
    """Of a layer's two products; both go through one alignment, so that ``rows`` are equal. ``sorted``: rows stay in
    the order of experts between them (moe_sorted.py), which pays from some dozens of rows an expert on."""

    gate_up: Tile
    down: Tile
    sorted: bool = False

    def __post_init__(self) -> None:
        assert self.gate_up.rows == self.down.rows and self.gate_up.by_warpgroups == self.down.by_warpgroups

    @property
    def by_warpgroups(self) -> bool:
        return self.gate_up.by_warpgroups


def shape_key(num_places: int, hidden: int, size: int, choices: int, dtype: torch.dtype) -> str:
    """How tables name a layer: places, hidden size, one expert's intermediate size on this rank, experts a token."""
    return f"places={num_places},hidden={hidden},size={size},choices={choices},{str(dtype).removeprefix('torch.')}"


def tiles_for(tokens: int, num_places: int, hidden: int, size: int, choices: int, dtype: torch.dtype,
              device: str, warpgroups: bool = False) -> Tiles:
    """Those measured with the nearest number of tokens, or the rule's. ``warpgroups``: products by warps with
    roles can compute this layer here."""
    measured = table(device).get(shape_key(num_places, hidden, size, choices, dtype))
    if measured:
        nearest = measured[min(measured, key=lambda known: abs(known - tokens))]
        if warpgroups or not nearest.by_warpgroups:
            return nearest
    rows_each = tokens * choices / num_places
    if warpgroups and rows_each >= WARPGROUPS_FROM:
        return warpgroup_tiles(dtype)
    return default_tiles(rows_each, dtype)


def warpgroup_tiles(dtype: torch.dtype, band: int = 4) -> Tiles:
    """The only ones that moe_warpgroups.py has, but for their ``band``."""
    depth = 128 // dtype.itemsize
    return Tiles(Tile(128, 128, depth, band, 12, 4), Tile(128, 256, depth, band, 12, 4), True)


def default_tiles(rows_each: float, dtype: torch.dtype) -> Tiles:
    """By the rows that an expert gets. Few: the weights are read once whatever the tile, by many programs. Many: as
    much reuse as registers allow; the gated product holds two tiles. Both fit an A100's shared memory."""
    if rows_each <= 32 or dtype == torch.float32:
        rows = next(rows for rows in (16, 32, 64) if rows_each <= rows or rows == 64)
        depth = 128 if dtype.itemsize <= 2 else 32
        return Tiles(Tile(rows, 64, depth, 1, 4, 3), Tile(rows, 128, depth, 1, 4, 3))
    if dtype.itemsize == 1:  # by blocks, a product stands beside each sum that it is scaled into
        return Tiles(Tile(64, 64, 128, 8, 4, 3), Tile(64, 128, 128, 8, 4, 3), True)
    return Tiles(Tile(128, 128, 64, 4, 8, 3), Tile(128, 128, 64, 4, 8, 3), True)


@lru_cache
def table(device: str) -> dict[str, dict[int, Tiles]]:
    """The measured tiles of ``device`` (torch's name of it), by shape and tokens; empty where none were measured."""
    file = file_of(FOLDER, device)
    if not file.exists():
        return {}
    return {shape: {int(tokens): Tiles(Tile(**tiles["gate_up"]), Tile(**tiles["down"]), tiles.get("sorted", False))
                    for tokens, tiles in by_tokens.items()}
            for shape, by_tokens in json.loads(file.read_text(encoding="utf-8")).items()}


def to_json(measured: dict[str, dict[int, Tiles]]) -> str:
    """The text of a table file."""
    content = {shape: {str(tokens): asdict(tiles) for tokens, tiles in sorted(by_tokens.items())}
               for shape, by_tokens in sorted(measured.items())}
    return json.dumps(content, indent=1) + "\n"


def file_of(folder: Path, device: str) -> Path:
    """Where ``folder`` has the table of ``device`` (torch's name of it)."""
    return folder / f"{device.replace(' ', '_')}.json"


@lru_cache
def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
