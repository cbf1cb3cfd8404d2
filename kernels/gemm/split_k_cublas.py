"""How the library's products of 129 to 256 rows are made faster on a GPU: by measured tiles of cuBLASLt's that keep
more multiprocessors busy than those it proposes, and by leaving sums to the norm behind.

Tables are ``tuning/cublaslt/{device name}.json``: by a weight's sizes and the number of rows, for bfloat16 and one
release of the library, whose numbers mean nothing to another. Found by trying all of the library's tiles, clusters and
variants (tests/bench/results/2026-11-21-decode-layer.md): a rule by how many multiprocessors have a tile chose worse
than the library for every other model's weights.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import torch

from .._triton import on_hopper
from ..attention.decode_plan import processors_of
from ..moe.moe_tiles import FOLDER, device_name, file_of
from .cublaslt import Algorithm, Plan, library

LEAST_ROWS, MOST_ROWS = 129, 256
_WELL_FILLED = 225
"""Rows that make two blocks of 128."""
_LEAST_DEPTH = 4096
_BUSY = 0.8
"""Depth of a piece, and the part of the multiprocessors that have one: less was not worth it."""


@dataclass(frozen=True)
class Table:
    """``products``: by ``(out, in)`` of the weight the algorithms, each with the least and the most rows that it is
    for."""

    release: tuple[int, int]
    products: dict[tuple[int, int], list[tuple[int, int, Algorithm]]]

    def algorithm(self, rows: int, out: int, width: int) -> Algorithm | None:
        for least, most, algorithm in self.products.get((out, width), ()):
            if least <= rows <= most:
                return algorithm
        return None


def better_plan(x: torch.Tensor, weight: torch.Tensor) -> Plan | None:
    """For ``x`` [T, in] ``@ weight`` [out, in] ``.T``; None where the library's own choice is as good as any known, or
    it is not the one that was measured."""
    if not _takes(x, weight) or x.dtype != torch.bfloat16 or not weight.is_contiguous():
        return None
    if x.data_ptr() % 16 or weight.data_ptr() % 16:
        return None
    return _plan(x.device, len(x), *weight.shape, x.stride(0))


def left_pieces(x: torch.Tensor, weight: torch.Tensor) -> int:
    """In how many pieces of its depth such a product is left to a norm that adds them up; 0 where it is not. Tiles of
    128 x 128 are then about as many as multiprocessors, and the library would make another pass over them."""
    if not _takes(x, weight) or len(x) < _WELL_FILLED:
        return 0
    tiles, processors = -(-len(x) // 128) * -(-len(weight) // 128), processors_of(x.device)
    pieces, width = processors // tiles, weight.shape[1]
    whole = pieces > 1 and width % (8 * pieces) == 0 and width >= _LEAST_DEPTH * pieces
    return pieces if whole and tiles * pieces >= _BUSY * processors else 0


def product_in_pieces(x: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
    """``[pieces, T, out]``, whose sum is the product."""
    return torch.bmm(x.unflatten(1, (pieces, -1)).transpose(0, 1), weight.unflatten(1, (pieces, -1)).permute(1, 2, 0))


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return (LEAST_ROWS <= len(x) <= MOST_ROWS and weight.itemsize == 2 and x.dtype == weight.dtype and x.stride(1) == 1
            and not x.stride(0) % 8 and not weight.shape[0] % 8 and not weight.shape[1] % 8 and on_hopper(x.device))


@functools.lru_cache(maxsize=4096)
def _plan(device: torch.device, rows: int, out: int, width: int, stride: int) -> Plan | None:
    found = table(device_name(device))
    algorithm = None if found is None else found.algorithm(rows, out, width)
    if found is None or algorithm is None:
        return None
    loaded = library(device.index)
    if loaded is None or loaded.release != found.release:
        return None
    try:
        return Plan(loaded, rows, out, width, stride, torch.bfloat16, algorithm)
    except NotImplementedError:
        return None


@functools.lru_cache
def table(device: str) -> Table | None:
    """Of ``device`` (torch's name of it); None where nothing was measured."""
    file = file_of(FOLDER.with_name("cublaslt"), device)
    if not file.exists():
        return None
    content = json.loads(file.read_text(encoding="utf-8"))
    products: dict[tuple[int, int], list[tuple[int, int, Algorithm]]] = {}
    for sizes, entries in content["products"].items():
        out, width = map(int, sizes.split("x"))
        products[out, width] = [(*entry["rows"], Algorithm(**entry["algorithm"])) for entry in entries]
    major, minor = content["release"]
    return Table((major, minor), products)
