"""Products of 129 to 256 rows by cuBLAS's batched splits, which a norm adds up, on an H200."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from baton.kernels import reference
from baton.kernels.gemm import dense_matmul
from baton.kernels.tuning.gemm import BatchedSplits
from baton.kernels.tuning.policy import policy_of

H200 = "NVIDIA H200"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_name() != H200, reason="the H200's numbers")]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


@pytest.mark.parametrize("rows", [129, 160, 256])
def test_splits_and_their_norm(rows):
    torch.manual_seed(rows)
    x, weight = random(rows, 14336), random(4096, 14336, scale=1 / 120)
    residual, gain = random(rows, 4096), random(4096)
    assert policy_of(x.device).gemm.fused_reduce(rows, 4096, 14336, 2) == BatchedSplits(2)
    assert dense_matmul.fuses_residual(x, weight)
    made = x.float() @ weight.float().T
    for got, want in zip(dense_matmul.matmul_rmsnorm(residual, x, weight, gain, 1e-5),
                         reference.rmsnorm(made.bfloat16(), gain, 1e-5, residual)):
        assert (got.float() - want.float()).norm() <= 0.006 * want.float().norm()


def test_a_captured_layer_equals_one_by_hand():
    """Replays are equal, also with other work between them."""
    torch.manual_seed(0)
    x, residual, gain = random(256, 4096), random(256, 4096), random(4096)
    gate_up, down = random(28672, 4096, scale=1 / 64), random(4096, 14336, scale=1 / 120)

    def layer() -> torch.Tensor:
        rows, total = x, residual
        for _ in range(3):
            y = dense_matmul.dense_matmul(rows, gate_up, gated=True)
            rows, total = dense_matmul.matmul_rmsnorm(total, y, down, gain, 1e-5)
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
