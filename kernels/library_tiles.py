"""How the library's products of 129 to 256 rows are made faster on a Hopper GPU: by larger shares of its
multiprocessors than its own choice keeps busy, and by leaving sums to the norm behind.

Chosen on an H200 over the layers of Llama-3-8B, by all of cuBLASLt's tiles (tests/bench/results).
"""

from __future__ import annotations

import functools

import torch

from .cublaslt import Algorithm, Plan, library
from .decode_plan import processors_of

LEAST_ROWS, MOST_ROWS = 129, 256
_USUAL, _LOW = 256, 224
"""Of the weight's rows beside 128 of the others: the tile that the library takes for large weights, and one for which
there are more of them."""
_DEARER = 1.05
"""What the low tile takes for as much work."""
_LOW_TILES = Algorithm(66, tile=221, custom=6, stages=35, cluster=5)
_WELL_FILLED = 225
"""Rows that make two blocks of 128."""
_LEAST_DEPTH = 4096
_BUSY = 0.8
"""Depth of a piece, and the part of the multiprocessors that have work: less is not worth it."""


def better_plan(x: torch.Tensor, weight: torch.Tensor) -> Plan | None:
    """For ``x`` [T, in] ``@ weight`` [out, in] ``.T``; None where the library chooses as well, or is not there."""
    if not _takes(x, weight) or len(x) < _WELL_FILLED or not weight.is_contiguous():
        return None
    if x.data_ptr() % 16 or weight.data_ptr() % 16 or not _fills(len(x), len(weight), processors_of(x.device)):
        return None
    return _plan(x.device.index or 0, len(x), *weight.shape, x.stride(0), x.dtype)


def left_pieces(x: torch.Tensor, weight: torch.Tensor) -> int:
    """In how many pieces of its depth such a product is left to a norm that adds them up; 0 where it is not. Tiles of
    128 x 128 are then about as many as multiprocessors, and the library would make another pass over them."""
    if not _takes(x, weight):
        return 0
    tiles, processors = -(-len(x) // 128) * -(-len(weight) // 128), processors_of(x.device)
    pieces, width = processors // tiles, weight.shape[1]
    whole = pieces > 1 and width % (8 * pieces) == 0 and width >= _LEAST_DEPTH * pieces
    return pieces if whole and tiles * pieces >= _BUSY * processors else 0


def product_in_pieces(x: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
    """``[pieces, T, out]``, whose sum is the product."""
    return torch.bmm(x.unflatten(1, (pieces, -1)).transpose(0, 1), weight.unflatten(1, (pieces, -1)).permute(1, 2, 0))


def _fills(rows: int, out: int, processors: int) -> bool:
    """Whether low tiles are so much better spread over multiprocessors, where there are enough of the usual ones."""
    usual, low = (-(-rows // 128) * -(-out // high) for high in (_USUAL, _LOW))
    turns, low_turns = -(-usual // processors), -(-low // processors)
    return usual >= _BUSY * processors and _DEARER * low_turns * _LOW < turns * _USUAL


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (LEAST_ROWS <= len(x) <= MOST_ROWS and weight.itemsize == 2 and x.dtype == weight.dtype and x.stride(1) == 1
            and not x.stride(0) % 8 and not weight.shape[0] % 8 and not weight.shape[1] % 8 and _hopper(x.device))


@functools.cache
def _hopper(device: torch.device) -> bool:
    known = device.type == "cuda" and torch.version.cuda is not None
    return known and torch.cuda.get_device_capability(device) == (9, 0)


@functools.lru_cache(maxsize=4096)
def _plan(device: int, rows: int, out: int, width: int, stride: int, dtype: torch.dtype) -> Plan | None:
    found = library(device)
    try:
        return None if found is None else Plan(found, rows, out, width, stride, dtype, _LOW_TILES)
    except NotImplementedError:  # another release of the library
        return None
