"""The library's products of 129 to 256 rows by tiles that it does not propose, and in pieces, on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from baton.kernels import reference
from baton.kernels.gemm import dense_matmul
from baton.kernels.gemm.cublaslt import Algorithm, Plan, library
from baton.kernels.gemm.split_k_cublas import better_plan, left_pieces, table

H200 = "NVIDIA H200"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_name() != H200, reason="the H200's tables")]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.float() - want.float()).norm() <= 0.004 * want.float().norm()


@pytest.mark.parametrize("rows", [225, 240, 256])
def test_a_product_equals_torchs(rows):
    if library(0).release != table(H200).release:
        pytest.skip("the table is of another release of cuBLASLt")
    torch.manual_seed(rows)
    wide, weight = random(rows, 8192), random(28672, 4096, scale=1 / 64)
    for x in (wide[:, :4096].contiguous(), wide[:, 4096:]):
        plan = better_plan(x, weight)
        assert plan is not None
        got = plan(x, weight)
        near(got, x.float() @ weight.float().T)
        for _ in range(5):
            assert torch.equal(plan(x, weight), got)


@pytest.mark.parametrize("rows", [225, 256])
def test_pieces_and_their_norm(rows):
    torch.manual_seed(rows)
    x, weight = random(rows, 14336), random(4096, 14336, scale=1 / 120)
    residual, gain = random(rows, 4096), random(4096)
    assert left_pieces(x, weight) == 2 and dense_matmul.adds_products(x, weight)
    made = x.float() @ weight.float().T
    for got, want in zip(dense_matmul.normed_product(residual, x, weight, gain, 1e-5),
                         reference.rmsnorm(made.bfloat16(), gain, 1e-5, residual)):
        assert (got.float() - want.float()).norm() <= 0.006 * want.float().norm()


def test_a_captured_layer_equals_one_by_hand():
    """With what the graph itself holds for a workspace, between other work; replays are equal."""
    torch.manual_seed(0)
    x, residual, gain = random(256, 4096), random(256, 4096), random(4096)
    gate_up, down = random(28672, 4096, scale=1 / 64), random(4096, 14336, scale=1 / 120)

    def layer() -> torch.Tensor:
        rows, total = x, residual
        for _ in range(3):
            y = dense_matmul.dense_matmul(rows, gate_up, gated=True)
            rows, total = dense_matmul.normed_product(total, y, down, gain, 1e-5)
        return rows

    want = layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer()
    for _ in range(5):
        got.zero_()
        graph.replay()
        linear(x, gate_up)
        assert torch.equal(got, want)


def test_splits_have_a_workspace():
    """Of the library's own: four parts of the depth, summed up by another kernel."""
    torch.manual_seed(0)
    x, weight = random(256, 14336), random(4096, 14336, scale=1 / 120)
    found = library(0)
    assert found is not None
    plan = Plan(found, 256, 4096, 14336, 14336, torch.bfloat16,
                Algorithm(66, tile=20, splits=2, reduction=2, custom=1, stages=35, cluster=3))
    near(plan(x, weight), x.float() @ weight.float().T)


def test_an_unknown_algorithm_is_refused():
    found = library(0)
    assert found is not None
    with pytest.raises(NotImplementedError):
        Plan(found, 256, 28672, 4096, 4096, torch.bfloat16, Algorithm(66, tile=20, custom=99, stages=35, cluster=50))
