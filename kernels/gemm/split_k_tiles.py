"""Which products of 65 to 128 rows are split among a Hopper GPU's multiprocessors, and how.

Chosen by ``python -m baton.tests.bench.decode_layer --batches 128,256`` on an H200, over the layers of Llama-3-8B; of
more rows cuBLAS's are faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .._triton import runs_gluon
from ..attention.decode_plan import processors_of

LEAST_ROWS, MOST_ROWS = 65, 128
_LEAST_BYTES = 32 << 20
_LEAST_STEPS = 8
_BUSY = 0.8
"""Bytes of a weight, steps of a piece, and multiprocessors with a tile each: less is not worth it."""


@dataclass(frozen=True)
class SplitKTile:
    """A tile is at most ``rows`` rows by twice ``height`` of the weight's, in steps of ``depth``, of which ``stages``
    are on their way, and ``pieces`` programs' work."""

    rows: int
    height: int
    depth: int
    stages: int
    pieces: int = 1

    @property
    def high(self) -> int:
        """Of the weight's rows."""
        return 2 * self.height


def split_tile(x: torch.Tensor, weight: torch.Tensor) -> SplitKTile | None:
    """The tile of ``x`` [T, in] ``@ weight`` [out, in] ``.T`` where there is about one for each multiprocessor; None
    where there is not, or the kernel does not run."""
    if not _takes(x, weight):
        return None
    tile, processors = SplitKTile(128, 128, 64, 4), processors_of(weight.device)
    return tile if _BUSY * processors <= -(-len(weight) // tile.high) <= processors else None


def left_tile(x: torch.Tensor, weight: torch.Tensor) -> SplitKTile | None:
    """The same of a product with too few tiles, whose sums are left in pieces."""
    if not _takes(x, weight) or len(weight) % 64:
        return None
    tile = SplitKTile(128, 64, 64, 6)
    pieces = processors_of(weight.device) // -(-len(weight) // tile.high)
    steps = weight.shape[1] // tile.depth
    return replace(tile, pieces=pieces) if pieces > 1 and steps >= _LEAST_STEPS * pieces else None


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels run, have whole steps and aligned rows, and enough to do."""
    out, width = weight.shape
    return (LEAST_ROWS <= len(x) <= MOST_ROWS and not width % 64 and not out % 16 and x.stride(1) == 1
            and not x.stride(0) % 8 and weight.itemsize == 2 and weight.nbytes >= _LEAST_BYTES
            and runs_gluon(weight.device))
