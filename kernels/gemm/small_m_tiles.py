"""Which products have few rows, and the tiles that serve them.

Chosen by ``python -m baton.tests.bench.skinny_matmul --sweep`` on an H200, over the layers of Llama-3-8B and
Qwen3-0.6B.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .._triton import runs_triton
from .persistent_tiles import streams

_RESIDENT = 264
"""Programs that an H200 computes at once, two on each multiprocessor: more pieces would wait for their turn."""
_PROCESSORS = 132
_AHEAD = 16 << 10
_LARGE, _LARGEST = 32 << 20, 48 << 20
"""Bytes of a 16-bit weight that keeps all multiprocessors reading without pieces, or few; and of one that is worth
reading by ourselves for more rows."""


@dataclass(frozen=True)
class SmallMTile:
    """One program's part of a product: ``columns`` outputs by steps of ``depth`` over one of ``pieces`` of the inner
    dimension, with ``stages`` steps on their way from memory; ``ahead`` bytes of its weights are fetched before the
    rows are there."""

    columns: int
    depth: int
    pieces: int
    warps: int
    stages: int
    ahead: int = 0


def most_rows(weight: torch.Tensor) -> int:
    """How many rows make a product with ``weight`` [out, in] one of few rows: with more, the library's is faster. 0
    where the kernel does not run, would read no whole vectors, or would find no tensor cores."""
    whole = weight.shape[1] * weight.itemsize % 16 == 0
    if not runs_triton(weight) or not whole or weight.itemsize > 2:
        return 0
    return 16 if weight.itemsize == 1 else 64 if weight.nbytes >= _LARGEST or streams(weight) else 32


def tile_for(rows: int, out: int, width: int, dtype: torch.dtype) -> SmallMTile:
    """The same for all numbers of rows but one, up to 32: a row's result does not depend on how many are beside it. One
    row by itself has no use for tensor cores, and many narrow columns need no pieces."""
    if rows == 1 and dtype.itemsize > 1:
        wide = 1 << 14 <= out < 1 << 16 and width >= 2048
        return _fetching(SmallMTile(4, 2048, 1, 4, 3) if wide else SmallMTile(8, 1024, 1, 4, 3), out)
    if dtype == torch.float32:
        return SmallMTile(16, 64, 1, 4, 3)
    if dtype.itemsize == 2 and 2 * out * width >= _LARGE:
        return _large(rows, out, width)
    columns, warps = (64, 4) if out > 2048 else (32, 2)
    depth = 256 if dtype.itemsize == 1 else 128
    tiles, steps = -(-out // columns), -(-width // depth)
    pieces = max(count for count in (1, 2, 4, 8)
                 if count == 1 or (tiles * count <= _RESIDENT and steps >= 4 * count))
    return _fetching(SmallMTile(columns, depth, pieces, warps, 4), out)


def _large(rows: int, out: int, width: int) -> SmallMTile:
    """With as many stages as there is shared memory for: of all but two of them the weights are under way. Where tiles
    are fewer than multiprocessors each has one to itself, and two programs share one where they are more."""
    tiles, steps = -(-out // 64), -(-width // 128)
    if tiles > _PROCESSORS:
        return _fetching(SmallMTile(64, 128, 1, 4, 4 if rows <= 32 else 3), out)
    pieces = max(count for count in (1, 2, 4, 8)
                 if count == 1 or (tiles * count <= _PROCESSORS and steps >= 24 * count))
    stages = 10 if rows <= 16 else 9 if rows <= 32 else 6
    tile = SmallMTile(64, 128, pieces, 4, stages)
    return _fetching(tile, out) if rows <= 32 else tile


def _fetching(tile: SmallMTile, out: int) -> SmallMTile:
    """Where all programs begin at once: to one that begins behind others the fetch is but a second reading."""
    programs = -(-out // tile.columns) * tile.pieces
    return replace(tile, ahead=_AHEAD) if programs <= _RESIDENT else tile
