"""Tiles of our float8 products."""

from __future__ import annotations

from typing import NamedTuple

from .forms import By


class Fp8Tile(NamedTuple):
    """One program's part of a product: ``rows`` x ``columns`` by steps of ``depth`` over one of ``pieces`` of the inner
    dimension, with ``stages`` steps on their way from memory."""

    rows: int
    columns: int
    depth: int
    pieces: int
    warps: int
    stages: int


MOST_ROWS = 128
"""With more, the library's products are faster."""


def tile_for(by: By, rows: int, out: int, width: int) -> Fp8Tile:
    """Few rows: narrow columns and pieces, so that every multiprocessor reads weights. Many: three programs share a
    multiprocessor, of which one scales its sums while the others multiply."""
    if rows > MOST_ROWS:
        return Fp8Tile(64, 128, 128, 1, 4, 3)
    tall = 64 if rows <= 64 else 128
    if out > 16384:
        return Fp8Tile(tall, 128, 128, 1, 4, 4) if tall == 64 else Fp8Tile(tall, 64, 128, 1, 4, 4)
    if by == "row":
        return Fp8Tile(tall, 32, 256, 2 if width > 8192 else 1, 4, 4 if tall == 64 else 3)
    return Fp8Tile(tall, 64, 128, 4 if width > 8192 else 2, 4, 4)
