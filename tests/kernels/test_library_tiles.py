"""Which of the library's products of 129 to 256 rows are made otherwise than it proposes, and what they come to."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from baton.kernels import cublaslt, dense_matmul, library_tiles, reference
from baton.kernels.cublaslt import Algorithm
from baton.kernels.library_tiles import better_plan, left_pieces, product_in_pieces


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(library_tiles, "_hopper", lambda device: True)
    monkeypatch.setattr(library_tiles, "processors_of", lambda device: 132)
    monkeypatch.setattr(library_tiles, "_plan", lambda *product: product)


def of(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device="meta")


@pytest.mark.parametrize("rows,out,better", [
    (256, 28672, True),  # 256 tiles on 2 x 132 multiprocessors, and 224 of the usual
    (240, 28672, True), (224, 28672, False), (257, 28672, False),
    (256, 128256, False),  # eight turns either way
    (256, 6144, False), (256, 4096, False),  # other tiles keep more multiprocessors busy
])
def test_low_tiles_where_they_fill_more_multiprocessors(hopper, rows, out, better):
    plan = better_plan(of(rows, 4096), of(out, 4096))
    assert plan == ((0, rows, out, 4096, 4096, torch.bfloat16) if better else None)


@pytest.mark.parametrize("rows,out,width,pieces", [
    (129, 4096, 14336, 2), (256, 4096, 14336, 2), (128, 4096, 14336, 0), (257, 4096, 14336, 0),
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


def test_without_the_library_torch_multiplies(monkeypatch):
    monkeypatch.setattr(library_tiles, "library", lambda device: None)
    assert library_tiles._plan(0, 256, 28671, 4096, 4096, torch.bfloat16) is None
    monkeypatch.setattr(cublaslt.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    with pytest.raises(OSError):
        cublaslt.Library()


def test_what_another_release_lacks_is_torchs(monkeypatch):
    """It is asked for every attribute, each by its number and size, and refuses the product."""
    asked: dict[int, int] = {}

    class Refuses:
        handle = cublaslt.c_pointer()

        def __call__(self, name, *values):
            if name == "MatmulAlgoConfigSetAttribute":
                asked[values[1].value] = values[3].value
            return name == "MatmulAlgoCheck"

        def expect(self, name, *values):
            assert not self(name, *values)

    monkeypatch.setattr(library_tiles, "library", lambda device: Refuses())
    assert library_tiles._plan(0, 256, 28673, 4096, 4096, torch.bfloat16) is None
    assert asked == {1: 4, 2: 4, 3: 4, 4: 4, 5: 4, 6: 4, 7: 2, 8: 2}


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
