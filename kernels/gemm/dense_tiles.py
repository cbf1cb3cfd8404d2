"""Which products of many rows are dense_warpgroups.py's, and by which tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._triton import runs_gluon
from ..attention.decode_plan import processors_of

MANY_ROWS = 1024
"""From so many on a pass over a product's result, and the power it takes, is worth sparing."""
_LEAST_USED = 0.9
"""Of what programs multiply: the rest is padding, or multiprocessors that wait for the last tiles. With more of that
cuBLAS and the activation by itself are as fast."""
_NEARLY = 0.03
"""Of that share, what tall tiles are worth."""


@dataclass(frozen=True)
class DenseTile:
    """``rows``, 128 or 192, x 256 of the weight's rows; ``band`` blocks of rows in turn; ``stages`` steps at once in
    shared memory."""

    rows: int
    stages: int
    band: int


TALL, USUAL = DenseTile(192, 3, 11), DenseTile(128, 4, 16)
"""Bands make what some 130 programs read at once about as high as it is wide."""


def takes_gated(weight: torch.Tensor) -> bool:
    """Whether products with ``weight`` [2 * size, in] that end in the activation can be dense_warpgroups.py's."""
    width = weight.shape[1]
    return (runs_gluon(weight.device) and weight.itemsize == 2 and weight.is_contiguous() and width >= 256
            and width % 8 == weight.shape[0] % 16 == weight.data_ptr() % 16 == 0)


def gated_tile(x: torch.Tensor, weight: torch.Tensor) -> DenseTile | None:
    """For the product of ``x`` [T, in] with ``weight``; None where cuBLAS's, and the activation behind it, had better
    be taken."""
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == x.data_ptr() % 16 == 0
    if len(x) < MANY_ROWS or x.dtype != weight.dtype or not aligned or not takes_gated(weight):
        return None
    return best_tile(len(x), weight.shape[0] // 2, processors_of(x.device))


def best_tile(rows: int, size: int, processors: int) -> DenseTile | None:
    """By the share of what is multiplied that is wanted: the tall one where that is nearly equal, None where it is
    low."""
    tall, usual = (_used(tile, rows, size, processors) for tile in (TALL, USUAL))
    if max(tall, usual) < _LEAST_USED:
        return None
    return TALL if tall + _NEARLY >= usual else USUAL


def _used(tile: DenseTile, rows: int, size: int, processors: int) -> float:
    tiles = -(-rows // tile.rows) * -(-size // 128)
    return rows * size / (-(-tiles // processors) * processors * tile.rows * 128)
