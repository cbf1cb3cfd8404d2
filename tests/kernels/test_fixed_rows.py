"""Products and element-wise functions on a CPU: a row's bits do not depend on its batch."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import reference
from baton.kernels.elementwise import by_element
from baton.kernels.gemm.dense_matmul import dense_matmul, library_matmul
from baton.kernels.reference.fixed_rows import calls, invariant_sizes
from baton.kernels.tuning.policy import set_batch_invariant


@pytest.fixture(autouse=True)
def invariant():
    set_batch_invariant(True)
    yield
    set_batch_invariant(False)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "expected"), [
    (0, []), (3, [(0, 3, 8)]), (32, [(0, 8, 8), (8, 16, 8), (16, 24, 8), (24, 32, 8)]), (33, [(0, 33, 64)]),
    (70, [(0, 64, 64), (64, 70, 8)])])
def test_calls_cover_all_rows(rows, expected):
    assert list(calls(rows, (8, 64))) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("out", "width"), [(1, 40), (3, 17), (8, 48), (131, 48), (96, 200), (256, 256)])
def test_products(dtype, out, width):
    x, weight, bias = randn(150, width).to(dtype), randn(out, width, seed=1).to(dtype), randn(out, seed=2).to(dtype)
    whole = dense_matmul(x, weight, bias)
    torch.testing.assert_close(whole.float(), x.float() @ weight.float().T + bias.float(), atol=0.1, rtol=0.02)
    for start, stop in ((0, 1), (7, 9), (3, 40), (41, 150), (149, 150)):
        assert torch.equal(library_matmul(x[start:stop], weight, bias), whole[start:stop])
    order = torch.randperm(150, generator=torch.Generator().manual_seed(3))
    assert torch.equal(dense_matmul(x[order], weight, bias), whole[order])
    assert dense_matmul(x[:0], weight, bias).shape == (0, out)


def test_products_of_float8():
    x, weight = randn(70, 256), randn(96, 256, seed=1).to(torch.float8_e4m3fn)
    rows = reference.quantize_groups(x, 256)
    whole = reference.scaled_matmul(*rows, weight, torch.ones(96), torch.float32)
    blocks = reference.block_matmul(*reference.quantize_groups(x, 128), weight, torch.ones(1, 2), (128, 128),
                                    torch.float32)
    for row in (0, 33, 69):
        one = x[row:row + 1]
        assert torch.equal(reference.scaled_matmul(*reference.quantize_groups(one, 256), weight, torch.ones(96),
                                                   torch.float32), whole[row:row + 1])
        assert torch.equal(reference.block_matmul(*reference.quantize_groups(one, 128), weight, torch.ones(1, 2),
                                                  (128, 128), torch.float32), blocks[row:row + 1])


def test_heads():
    x, w = randn(40, 3, 24), randn(3, 24, 20, seed=1)
    whole = reference.per_head_matmul(x, w)
    torch.testing.assert_close(whole, torch.einsum("thk,hkn->thn", x, w))
    assert torch.equal(reference.per_head_matmul(x[5:6], w), whole[5:6])


def test_elements():
    """131 columns: torch's loop leaves a rest, which differs from row to row."""
    x = randn(64, 131) * 3
    whole = by_element(torch.sigmoid, x)
    assert all(torch.equal(by_element(torch.sigmoid, x[row]), whole[row]) for row in range(64))
    torch.testing.assert_close(whole, x.sigmoid())


def test_sizes_that_differ_are_not_used():
    """A library whose rows depend on the number of rows of a call, and one whose rows depend on their place."""
    assert invariant_sizes(((8, 64), (16,)), 4, lambda x: x + 1) == (8, 64)
    assert invariant_sizes(((8, 64), (16,)), 4, lambda x: x + len(x)) == (16,)
    assert invariant_sizes(((8, 64), (16,)), 4, lambda x: x + torch.arange(len(x))[:, None]) == (1,)
