"""Which products of 65 to 256 rows are shared out, and that every program has work."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import split_tiles
from baton.kernels.split_tiles import left_tile, split_tile


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(split_tiles, "runs_gluon", lambda device: True)
    monkeypatch.setattr(split_tiles, "processors_of", lambda device: 132)


def of(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("rows", [65, 128, 129, 256])
def test_many_tiles_are_shared_out(rows):
    tile = split_tile(of(rows, 4096), of(28672, 4096))
    assert tile is not None and tile.pieces == 1 and rows <= tile.rows
    assert -(-28672 // tile.high) >= 0.8 * tile.programs, "a share is a tile at least, and nearly all have one"
    assert left_tile(of(rows, 4096), of(28672, 4096)) is None
    assert (split_tile(of(rows, 4096), of(128256, 4096)) is None) == (rows <= 128)


@pytest.mark.parametrize("rows,width", [(65, 4096), (128, 14336)])
def test_few_are_cut_in_pieces(rows, width):
    x, weight = of(rows, width), of(4096, width)
    tile = left_tile(x, weight)
    assert split_tile(x, weight) is None and tile is not None and rows <= tile.rows
    programs = -(-4096 // tile.high) * tile.pieces
    assert 120 <= programs <= 132 and width // tile.depth >= tile.pieces
    assert left_tile(of(256, width), weight) is None


@pytest.mark.parametrize("x,weight", [
    (of(64, 4096), of(28672, 4096)), (of(257, 4096), of(28672, 4096)), (of(256, 4096), of(28680, 4096)),
    (of(256, 4100), of(28672, 4100)), (of(256, 1024), of(2048, 1024)), (of(256, 4096), of(28672, 4096).float()),
    (of(4096, 256).T, of(28672, 4096)), (of(256, 4100)[:, :4096], of(28672, 4096)),
], ids=range(8))
def test_others_are_the_librarys(x, weight):
    """Of fewer or more rows, of sizes or strides that the loads do not take, of small weights, of wider types."""
    assert split_tile(x, weight) is None and left_tile(x, weight) is None


def test_without_gluon_none_is_taken(monkeypatch):
    monkeypatch.setattr(split_tiles, "runs_gluon", lambda device: False)
    assert split_tile(of(256, 4096), of(28672, 4096)) is None
