"""Which products have few rows, and the tiles that serve them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._triton import runs_triton

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
    """How many rows make a product with ``weight`` [out, in] one of few rows: as long as reading the weight takes
    longest. 0 where the kernel does not run, or would read no whole vectors, or finds no tensor cores."""
    vectors = weight.shape[1] * weight.itemsize % 16 == 0
    return _MOST_ROWS if runs_triton(weight) and weight.itemsize <= 2 and vectors else 0


def tile_for(out: int, width: int, dtype: torch.dtype) -> SkinnyTile:
    """One form for all numbers of rows, so that a row's result does not depend on how many are beside it."""
    if dtype == torch.float32:
        return SkinnyTile(16, 64, 1, 4, 3, 0)
    return SkinnyTile(64, 128, 1 if out > 8192 else 4 if out <= 4096 else 2, 4, 5, 128)
