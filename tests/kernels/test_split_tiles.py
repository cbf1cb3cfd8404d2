"""Which products of 65 to 128 rows are split, and that every program has work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from baton.kernels import reference
from baton.kernels.gemm import dense_matmul, split_k_tiles
from baton.kernels.gemm.split_k_tiles import SplitKTile, left_tile, split_tile


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(split_k_tiles, "runs_gluon", lambda device: True)
    monkeypatch.setattr(split_k_tiles, "processors_of", lambda device: 132)


def of(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("rows", [65, 128])
def test_a_tile_for_nearly_every_multiprocessor(rows):
    tile = split_tile(of(rows, 4096), of(28672, 4096))
    assert tile is not None and tile.pieces == 1 and rows <= tile.rows
    assert 0.8 * 132 <= -(-28672 // tile.high) <= 132
    assert left_tile(of(rows, 4096), of(28672, 4096)) is None and split_tile(of(rows, 4096), of(128256, 4096)) is None


@pytest.mark.parametrize("rows,width", [(65, 4096), (128, 14336)])
def test_few_are_cut_in_pieces(rows, width):
    x, weight = of(rows, width), of(4096, width)
    tile = left_tile(x, weight)
    assert split_tile(x, weight) is None and tile is not None and rows <= tile.rows
    programs = -(-4096 // tile.high) * tile.pieces
    assert 120 <= programs <= 132 and width // tile.depth >= tile.pieces
    assert left_tile(of(129, width), weight) is None


@pytest.mark.parametrize("x,weight", [
    (of(64, 4096), of(28672, 4096)), (of(129, 4096), of(28672, 4096)), (of(100, 4096), of(28680, 4096)),
    (of(100, 4100), of(28672, 4100)), (of(100, 1024), of(2048, 1024)), (of(100, 4096), of(28672, 4096).float()),
    (of(4096, 100).T, of(28672, 4096)), (of(100, 4100)[:, :4096], of(28672, 4096)),
], ids=range(8))
def test_others_are_the_librarys(x, weight):
    """Of fewer or more rows, of sizes or strides that the loads do not take, of small weights, of wider types."""
    assert split_tile(x, weight) is None and left_tile(x, weight) is None


def test_without_gluon_none_is_taken(monkeypatch):
    monkeypatch.setattr(split_k_tiles, "runs_gluon", lambda device: False)
    assert split_tile(of(100, 4096), of(28672, 4096)) is None


def test_captured_products_are_split(monkeypatch):
    """In a CUDA graph alone; a norm adds up what a product of few tiles leaves."""
    def pieces(x: torch.Tensor, weight: torch.Tensor, tile: SplitKTile, dtype: torch.dtype) -> torch.Tensor:
        halves = zip(x.split(32, 1), weight.split(32, 1))
        parts = [torch.nn.functional.pad(linear(*half), (0, 0, 0, tile.rows - len(x))) for half in halves]
        return torch.stack(parts).to(dtype)

    tile = SplitKTile(128, 64, 64, 6, 2)
    split = SimpleNamespace(split_matmul=lambda x, weight, tile, gated: ("split", gated), split_pieces=pieces)
    monkeypatch.setattr(dense_matmul, "_split", lambda: split)
    for name in ("split_tile", "left_tile"):
        monkeypatch.setattr(dense_matmul, name, lambda x, weight: tile)
    x, weight, gain, residual = torch.randn(70, 64), torch.randn(8, 64), torch.randn(8), torch.randn(70, 8)
    assert torch.equal(dense_matmul.dense_matmul(x, weight), linear(x, weight)), "launched by the host"
    want = reference.rmsnorm(linear(x, weight), gain, 1e-5, residual)
    for got, wanted in zip(dense_matmul.normed_product(residual, x, weight, gain, 1e-5), want):
        torch.testing.assert_close(got, wanted)
    monkeypatch.setattr(dense_matmul, "_in_graph", lambda x: True)
    assert dense_matmul.dense_matmul(x, weight, gated=True) == ("split", True)
    assert torch.equal(dense_matmul.dense_matmul(x, weight, gain), linear(x, weight, gain)), "a bias is not added"
