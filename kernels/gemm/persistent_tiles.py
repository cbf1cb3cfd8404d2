"""Which products of few rows stream their weights (streamed_matmul.py), and by which tiles.

Chosen by ``python -m baton.tests.bench.decode_layer`` on an H200, over the layers of Llama-3-8B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._triton import runs_gluon

_LARGE, _DEEP = 32 << 20, 4096
"""Bytes of a weight, and its depth, from which on other kernels than ours were measured to be slower."""
_WIDE = 132 * 64
"""Columns that give each of an H200's multiprocessors more than one tile."""
_RING = 204 << 10
"""Bytes of shared memory for what is under way: a multiprocessor has 227 KiB, of which a tile's end takes some."""


@dataclass(frozen=True)
class PersistentTile:
    """One turn of a program that stays: ``block`` rows of the weight seen as ``split`` times as many, by steps of
    ``depth``, of which ``stages`` are under way in each of ``programs`` programs a multiprocessor."""

    block: int
    split: int
    depth: int
    stages: int
    programs: int = 1

    def tall(self, rows: int) -> int:
        """Rows as the tensor cores take them."""
        return max(8, 1 << (rows - 1).bit_length())


def streams(weight: torch.Tensor) -> bool:
    """Whether ``weight`` [out, in] is one for ``streamed_tile``, with rows that are contiguous."""
    return (weight.itemsize == 2 and weight.nbytes >= _LARGE and weight.shape[1] >= _DEEP and weight.shape[1] % 16 == 0
            and weight.is_contiguous() and runs_gluon(weight.device))


def streamed_tile(rows: int, out: int, width: int) -> PersistentTile | None:
    """None where skinny_matmul.py's own kernel is quicker. Numbers of rows change what is under way; not how a row is
    summed up, in two parts."""
    if rows <= 16:
        block, depth = 64, 128
    elif rows <= 32 and out > _WIDE:  # each row comes from the level-2 cache once a tile
        block, depth = 128, 64
    elif rows <= 64 and out <= _WIDE:
        block, depth = 64, 64
    else:
        return None
    tall = PersistentTile(block, 2, depth, 1).tall(rows)
    return PersistentTile(block, 2, depth, _RING // ((block + 2 * tall) * depth * 2))
