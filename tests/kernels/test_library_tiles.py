"""Which of the library's products of 129 to 256 rows are made otherwise than it proposes, and what they come to."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from baton.kernels import reference
from baton.kernels.gemm import cublaslt, dense_matmul, split_k_cublas
from baton.kernels.gemm.cublaslt import Algorithm
from baton.kernels.gemm.split_k_cublas import better_plan, left_pieces, product_in_pieces

H200 = "NVIDIA H200"


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(split_k_cublas, "on_hopper", lambda device: True)
    monkeypatch.setattr(split_k_cublas, "processors_of", lambda device: 132)
    monkeypatch.setattr(split_k_cublas, "_plan", lambda *product: product[1:])


def of(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("rows,out,width,tile", [
    (256, 28672, 4096, 221), (225, 28672, 4096, 221), (224, 28672, 4096, None), (257, 28672, 4096, None),
    (192, 28672, 4096, None), (240, 28672, 8192, 221), (256, 4096, 14336, None), (256, 24576, 4096, None),
])
def test_measured_products_have_their_tiles(rows, out, width, tile):
    found = split_k_cublas.table(H200)
    assert found is not None
    algorithm = found.algorithm(rows, out, width)
    assert (algorithm and algorithm.tile) == tile


def test_tables_are_of_one_entry_a_number_of_rows():
    found = split_k_cublas.table(H200)
    assert found is not None and found.products and split_k_cublas.table("another GPU") is None
    for entries in found.products.values():
        rows = [rows for least, most, _ in entries for rows in range(least, most + 1)]
        assert len(rows) == len(set(rows)) and min(rows) >= split_k_cublas.LEAST_ROWS
        assert max(rows) <= split_k_cublas.MOST_ROWS


def test_a_plan_is_asked_for_by_its_sizes(hopper):
    assert better_plan(of(240, 8192)[:, :4096], of(28672, 4096)) == (240, 28672, 4096, 8192)


@pytest.mark.parametrize("rows,out,width,pieces", [
    (225, 4096, 14336, 2), (256, 4096, 14336, 2), (224, 4096, 14336, 0), (257, 4096, 14336, 0),
    (256, 4096, 4096, 0),  # not deep enough
    (256, 8192, 28672, 0), (256, 28672, 8192, 0),  # tiles enough
    (256, 2048, 8192, 0), (256, 4096, 14344, 0),  # too few are left, or halves begin at odd places
])
def test_deep_products_of_few_tiles_are_left_in_pieces(hopper, rows, out, width, pieces):
    assert left_pieces(of(rows, width), of(out, width)) == pieces


def test_rows_that_the_library_cannot_read_are_torchs(hopper):
    weight = of(28672, 4096)
    assert better_plan(of(256, 4100)[:, :4096], weight) is None, "rows begin at odd places"
    assert better_plan(of(4096, 256).T, weight) is None and left_pieces(of(14336, 256).T, of(4096, 14336)) == 0
    assert better_plan(of(256, 4096).float(), weight) is None


def test_elsewhere_all_is_torchs():
    x, weight = torch.zeros(256, 64), torch.zeros(512, 64)
    assert better_plan(x.bfloat16(), weight.bfloat16()) is None and left_pieces(x, weight) == 0


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(split_k_cublas, "device_name", lambda device: H200)
    split_k_cublas._plan.cache_clear()
    yield torch.device("cuda", 0)
    split_k_cublas._plan.cache_clear()


class Loaded:
    """A library that refuses every product; ``asked``: attributes' sizes by their numbers."""

    handle = cublaslt.c_pointer()

    def __init__(self, release):
        self.release, self.asked = release, {}

    def __call__(self, name, *values):
        if name == "MatmulAlgoConfigSetAttribute":
            self.asked[values[1].value] = values[3].value
        return name == "MatmulAlgoCheck"

    def expect(self, name, *values):
        assert not self(name, *values)


def test_without_the_library_torch_multiplies(monkeypatch, h200):
    monkeypatch.setattr(split_k_cublas, "library", lambda device: None)
    assert split_k_cublas._plan(h200, 256, 28672, 4096, 4096) is None
    monkeypatch.setattr(cublaslt.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    with pytest.raises(OSError):
        cublaslt.Library()


@pytest.mark.parametrize("release,asked", [((13, 1), [4, 4, 4, 4, 4, 4, 2, 2]), ((13, 2), []), ((12, 9), [])])
def test_what_the_library_refuses_is_torchs(monkeypatch, h200, release, asked):
    """It is asked for every attribute, each by its number and size; another release is not asked."""
    loaded = Loaded(release)
    monkeypatch.setattr(split_k_cublas, "library", lambda device: loaded)
    assert split_k_cublas._plan(h200, 256, 28672, 4096, 4096) is None
    assert list(loaded.asked.values()) == asked and list(loaded.asked) == list(range(1, 1 + len(asked)))


def test_dense_products_are_the_plans(monkeypatch):
    x, weight = torch.randn(4, 8), torch.randn(6, 8)
    plan = lambda x, weight: 2 * linear(x, weight)  # noqa: E731
    monkeypatch.setattr(dense_matmul, "better_plan", lambda x, weight: plan)
    assert torch.equal(dense_matmul.dense_matmul(x, weight), 2 * linear(x, weight))
    want = reference.silu_and_mul(2 * linear(x, weight))
    torch.testing.assert_close(dense_matmul.dense_matmul(x, weight, gated=True), want)
    bias = torch.randn(6)
    assert torch.equal(dense_matmul.dense_matmul(x, weight, bias), linear(x, weight, bias)), "a bias is torch's to add"


def test_a_norm_adds_up_the_pieces(monkeypatch):
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24)[:, :16], torch.randn(6, 16)
    gain, residual = torch.randn(6), torch.randn(5, 6)
    torch.testing.assert_close(product_in_pieces(x, weight, 2).sum(0), linear(x, weight))
    want = reference.rmsnorm(linear(x, weight), gain, 1e-5, residual)
    monkeypatch.setattr(dense_matmul, "left_pieces", lambda x, weight: 2)
    for got, wanted in zip(dense_matmul.normed_product(residual.clone(), x, weight, gain, 1e-5), want):
        torch.testing.assert_close(got, wanted)


def test_an_algorithms_attributes_are_numbered_as_the_librarys():
    names = [field.name for field in cublaslt.fields(Algorithm)]
    assert names == ["id", "tile", "splits", "reduction", "swizzle", "custom", "stages", "inner", "cluster"]
