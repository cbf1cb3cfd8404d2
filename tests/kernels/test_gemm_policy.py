"""Kernels and tiles of products: an H200's are those that were measured, and every program has work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear

from baton.kernels import reference
from baton.kernels.gemm import dense_matmul
from baton.kernels.tuning.gemm import BatchedSplits, SplitKTile

from .h200 import H200, policy_of_h200

GEMM, NUMBERS = H200.gemm, H200.gemm.numbers
TALL, USUAL = NUMBERS.warp_specialized.tall, NUMBERS.warp_specialized.usual


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(dense_matmul, "policy_of", lambda device: H200)


def of(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device="meta")


# Few rows.

@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (4096, 14336), (768, 4096), (1024, 2048), (64, 128)])
def test_tiles_keep_a_gpu_busy_and_have_work_for_every_split(shape):
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tile = GEMM.small_m(8, *shape, dtype)
        assert tile == GEMM.small_m(2, *shape, dtype) == GEMM.small_m(16, *shape, dtype)
        programs, steps = shape[0] / tile.columns * tile.splits, shape[1] / tile.depth
        assert tile.splits == 1 or steps / tile.splits >= 4
        assert programs >= 64 or steps / tile.splits < 8 or tile.splits == 8
        assert not tile.prefetch_bytes or programs <= 264


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 14336),
                                   (128256, 4096)])
def test_tiles_of_large_products_fit_an_sm_and_sum_alike(shape):
    """Numbers of rows change how many stages there are, and what is fetched; not how a row is summed up."""
    some = [(rows, GEMM.small_m(rows, *shape, torch.bfloat16)) for rows in (2, 16, 17, 32, 33, 64)]
    for rows, tile in some:
        padded = 16 if rows <= 16 else 32 if rows <= 32 else 64
        assert tile.stages * (tile.columns + padded) * tile.depth * 2 <= 227 << 10
        assert -(-shape[0] // tile.columns) * tile.splits <= 132 or tile.splits == 1
    assert len({(tile.columns, tile.depth, tile.splits, tile.warps) for _, tile in some}) == 1


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)])
def test_persistent_tiles_fit_an_sm(shape):
    for rows in (1, 8, 9, 16, 17, 32, 33, 64):
        tile = GEMM.persistent(rows, *shape)
        assert tile.stages >= 4 and tile.padded_rows(rows) >= rows
        assert tile.stages * (tile.block + tile.folds * tile.padded_rows(rows)) * tile.depth * 2 <= 208 << 10
        assert shape[1] % (8 * tile.folds) == 0
        assert tile.folds == (1 if rows > 16 and (shape[0] == 6144 or rows > 32 and shape[0] > 10_000) else 2)
    assert GEMM.persistent(65, *shape) is None


# 65 to 128 rows.

@pytest.mark.parametrize("rows", [65, 128])
def test_a_tile_for_nearly_every_sm(rows):
    tile = GEMM.split_k(rows, 28672, 4096, 2)
    assert tile is not None and tile.splits == 1 and rows <= tile.rows
    assert 0.8 * 132 <= -(-28672 // tile.weight_rows) <= 132
    assert GEMM.fused_reduce(rows, 28672, 4096, 2) is None and GEMM.split_k(rows, 128256, 4096, 2) is None


@pytest.mark.parametrize("rows,width", [(65, 4096), (128, 14336)])
def test_few_tiles_are_split(rows, width):
    tile = GEMM.fused_reduce(rows, 4096, width, 2)
    assert GEMM.split_k(rows, 4096, width, 2) is None and isinstance(tile, SplitKTile) and rows <= tile.rows
    programs = -(-4096 // tile.weight_rows) * tile.splits
    assert 120 <= programs <= 132 and width // tile.depth >= tile.splits
    assert not isinstance(GEMM.fused_reduce(129, 4096, width, 2), SplitKTile)


@pytest.mark.parametrize("x,weight", [
    (of(64, 4096), of(28672, 4096)), (of(129, 4096), of(28672, 4096)), (of(100, 4096), of(28680, 4096)),
    (of(100, 4100), of(28672, 4100)), (of(100, 1024), of(2048, 1024)), (of(100, 4096), of(28672, 4096).float()),
    (of(4096, 100).T, of(28672, 4096)), (of(100, 4100)[:, :4096], of(28672, 4096)),
], ids=range(8))
def test_others_are_the_librarys(hopper, monkeypatch, x, weight):
    """Products with fewer or more rows, sizes or strides that the loads do not take, small weights, and wider types."""
    monkeypatch.setattr(dense_matmul, "linear", lambda *given: "library")
    monkeypatch.setattr(dense_matmul, "small_m_matmul", lambda *given, **how: "library")
    assert dense_matmul.dense_matmul(x, weight) == "library"
    assert dense_matmul._fused_reduce(x, weight) is None


def test_without_gluon_none_is_taken():
    assert policy_of_h200(runs_gluon=False).gemm.split_k(100, 28672, 4096, 2) is None


def test_products_are_split(monkeypatch):
    """Outside of CUDA graphs as well; a norm adds up what a product of few tiles leaves."""
    def partials(x: torch.Tensor, weight: torch.Tensor, tile: SplitKTile, dtype: torch.dtype) -> torch.Tensor:
        halves = zip(x.split(32, 1), weight.split(32, 1))
        parts = [torch.nn.functional.pad(linear(*half), (0, 0, 0, tile.rows - len(x))) for half in halves]
        return torch.stack(parts).to(dtype)

    tile = SplitKTile(128, 64, 64, 6, 2)
    split = SimpleNamespace(split_k_matmul=lambda x, weight, tile, gated: ("split", gated), split_k_partials=partials)
    gemm = SimpleNamespace(batch_invariant=False, split_k=lambda *shape: tile, fused_reduce=lambda *shape: tile,
                           small_m_max_rows=lambda *shape: 0, invariant=lambda itemsize: None)
    monkeypatch.setattr(dense_matmul, "_split_k", lambda: split)
    monkeypatch.setattr(dense_matmul, "policy_of", lambda device: SimpleNamespace(gemm=gemm))
    x, weight, gain, residual = torch.randn(70, 64), torch.randn(8, 64), torch.randn(8), torch.randn(70, 8)
    want = reference.rmsnorm(linear(x, weight), gain, 1e-5, residual)
    for got, wanted in zip(dense_matmul.matmul_rmsnorm(residual, x, weight, gain, 1e-5), want):
        torch.testing.assert_close(got, wanted)
    assert dense_matmul.dense_matmul(x, weight, gated=True) == ("split", True)
    assert torch.equal(dense_matmul.dense_matmul(x, weight, gain), linear(x, weight, gain)), "a bias is not added"


# 129 to 256 rows.

@pytest.mark.parametrize("rows,out,width,splits", [
    (129, 4096, 14336, 2), (256, 4096, 14336, 2), (257, 4096, 14336, 0),
    (256, 4096, 4096, 0),  # not deep enough
    (256, 8192, 28672, 0), (256, 28672, 8192, 0),  # tiles enough
    (256, 2048, 8192, 0), (256, 4096, 14344, 0),  # too few are left, or parts begin at odd addresses
])
def test_deep_products_of_few_tiles_are_left_to_the_norm(hopper, rows, out, width, splits):
    found = dense_matmul._fused_reduce(of(rows, width), of(out, width))
    assert found == (BatchedSplits(splits) if splits else None)


def test_rows_that_the_library_cannot_read_in_parts_are_whole(hopper):
    assert dense_matmul._fused_reduce(of(14336, 256).T, of(4096, 14336)) is None
    assert dense_matmul._fused_reduce(of(256, 14340)[:, :14336], of(4096, 14336)) is None
    assert dense_matmul._fused_reduce(of(256, 14336).float(), of(4096, 14336)) is None


def test_a_norm_adds_up_the_splits(monkeypatch):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24)[:, :16], torch.randn(6, 16)
    gain, residual = torch.randn(6), torch.randn(5, 6)
    torch.testing.assert_close(dense_matmul.split_product(x, weight, 2).sum(0), linear(x, weight))
    want = reference.rmsnorm(linear(x, weight), gain, 1e-5, residual)
    monkeypatch.setattr(dense_matmul, "_fused_reduce", lambda x, weight: BatchedSplits(2))
    for got, wanted in zip(dense_matmul.matmul_rmsnorm(residual.clone(), x, weight, gain, 1e-5), want):
        torch.testing.assert_close(got, wanted)


# Many rows.

@pytest.mark.parametrize("rows,tile", [(8192, TALL), (4096, TALL), (1024, USUAL), (1040, None)])
def test_little_is_padding(rows, tile):
    """Llama-3-8B's on an H200."""
    assert GEMM.warp_specialized(rows, 2 * 14336, 4096, 2) == tile


def test_a_cpu_has_no_kernels_of_its_own():
    x, weight = torch.zeros(NUMBERS.warp_specialized.min_rows, 256).bfloat16(), torch.zeros(256, 256).bfloat16()
    assert dense_matmul.activation_tile(x, weight) is None
    assert dense_matmul._fused_reduce(x[:256], weight) is None
