"""Tiles of our float8 products, as measured on an H200 with Llama-3-8B's layers."""

from __future__ import annotations

from typing import NamedTuple

from ..arguments import By


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
_MOST_PROGRAMS = 264
"""Two for each multiprocessor."""
_LEAST_STEPS = 16
"""Of a piece: fewer cost more to add up than they spread."""


def tile_for(by: By, rows: int, out: int, width: int) -> Fp8Tile:
    """Few rows: narrow columns and pieces, so that every multiprocessor reads weights. Many: three programs share a
    multiprocessor, of which one scales its sums while the others multiply."""
    if rows > MOST_ROWS:
        return Fp8Tile(64, 128, 128, 1, 4, 3)
    if rows > 64:
        return _in_pieces(Fp8Tile(128, 64, 128, 1, 4, 4), out, width)
    if out > 16384:
        return Fp8Tile(64, 128, 128, 1, 4, 4)
    if by == "row":
        return _in_pieces(Fp8Tile(64, 32, 256, 1, 4, 4), out, width)
    return _in_pieces(Fp8Tile(64, 64, 128, 1, 4, 6), out, width)


def _in_pieces(tile: Fp8Tile, out: int, width: int) -> Fp8Tile:
    tiles, steps, pieces = -(-out // tile.columns), -(-width // tile.depth), 1
    while 2 * pieces * tiles <= _MOST_PROGRAMS and steps >= 2 * pieces * _LEAST_STEPS:
        pieces *= 2
    return tile._replace(pieces=pieces)
