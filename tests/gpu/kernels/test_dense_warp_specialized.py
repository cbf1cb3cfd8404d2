"""Warp-specialized products of many rows on a Hopper GPU, against plain torch."""

from __future__ import annotations

import pytest
import torch

from baton.common.distributed.deferred_reduce import DeferredProduct
from baton.kernels import reference
from baton.kernels.gemm.dense_matmul import activation_tile, dense_matmul
from baton.kernels.tuning.gemm import WarpSpecializedTile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's alone")]


TALL, USUAL = WarpSpecializedTile(192, 3, 11), WarpSpecializedTile(128, 4, 16)


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.float() - want).norm() <= 0.004 * want.norm()
    assert (got.float() - want).abs().max() <= 0.02 * want.abs().max()


@pytest.mark.parametrize("tile", [TALL, USUAL], ids=["192", "128"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("rows,columns,depth,dtype", [
    (129, 128, 256, torch.bfloat16), (1000, 4096, 4096, torch.bfloat16), (8191, 1536, 2048, torch.float16),
    (8192, 14336, 4096, torch.bfloat16), (1, 8, 200, torch.bfloat16), (1030, 3080, 1032, torch.bfloat16),
    (5000, 4864, 896, torch.bfloat16), (4097, 264, 14336, torch.float16),
], ids=str)
def test_a_product_equals_torchs(rows, columns, depth, dtype, gated, tile):
    """Whole tiles and parts of them, in rows, columns and depth; the same bits each time; no row's result depends on
    the others."""
    from baton.kernels.gemm.dense_warp_specialized import warp_specialized_matmul  # not there without Triton
    torch.manual_seed(0)
    x, weight = random(rows, depth, dtype=dtype), random(columns * (1 + gated), depth, dtype=dtype, scale=depth**-0.5)
    got = warp_specialized_matmul(x, weight, tile, gated=gated)
    want = x.float() @ weight.float().T
    assert got.dtype == dtype
    near(got, reference.silu_and_mul(want) if gated else want)
    for _ in range(3):
        assert torch.equal(warp_specialized_matmul(x, weight, tile, gated=gated), got)
    assert torch.equal(warp_specialized_matmul(x[rows // 2:], weight, tile, gated=gated), got[rows // 2:])


@pytest.mark.parametrize("rows", [1024, 2048, 8192])
def test_gates_and_ups_end_in_the_activation(rows):
    torch.manual_seed(0)
    x, weight = random(rows, 1024, dtype=torch.bfloat16), random(2 * 14336, 1024, dtype=torch.bfloat16, scale=1 / 32)
    assert activation_tile(x, weight) is not None
    near(dense_matmul(x, weight, gated=True), reference.silu_and_mul(x.float() @ weight.float().T))
    assert activation_tile(x[:, 1:], weight[:, 1:]) is None, "no tile begins there"


def test_a_product_is_added_to_the_residual_as_it_is_made():
    torch.manual_seed(0)
    x, weight = random(1500, 1024, dtype=torch.bfloat16), random(512, 1024, dtype=torch.bfloat16, scale=1 / 32)
    residual, gain = random(1500, 512, dtype=torch.bfloat16), random(512, dtype=torch.bfloat16)
    want = reference.rmsnorm(x.float() @ weight.float().T, gain.float(), 1e-5, residual.float())
    for got, twin in zip(DeferredProduct(x, weight).add_norm(residual, gain, 1e-5), want):
        near(got, twin)
