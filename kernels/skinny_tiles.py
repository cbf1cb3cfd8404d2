"""Which products have few rows, and the tiles that serve them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MOST_ROWS = 64


@dataclass(frozen=True)
class SkinnyTile:
    """One program's part of a product: ``columns`` outputs by steps of ``depth`` over one of ``pieces`` of the inner
    dimension; ``ahead`` values of each output's weights are fetched before the rows are there."""

    columns: int
    depth: int
    pieces: int
    warps: int
    stages: int
    ahead: int
    form: str = "weights first"


def most_rows(weight: torch.Tensor) -> int:
    """How many rows make a product with ``weight`` [out, in] one of few rows; 0: none. It is where reading the weight
    takes longest, in whole vectors, by tensor cores."""
    vectors = weight.shape[1] * weight.itemsize % 16 == 0
    return _MOST_ROWS if weight.itemsize <= 2 and vectors else 0


def tile_for(out: int, width: int, dtype: torch.dtype) -> SkinnyTile:
    """One form for all numbers of rows, so that a row's result does not depend on how many are beside it."""
    if dtype == torch.float32:
        return SkinnyTile(16, 64, 1, 4, 3, 0)
    if dtype.itemsize == 1:
        return SkinnyTile(32, 128, 1, 2, 5, 512)
    return SkinnyTile(16 if out <= 8192 else 64, 128, 1, 4, 4, 512)
