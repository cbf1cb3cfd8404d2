"""Products of many rows by warps with roles, on a Hopper GPU, against plain torch."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's alone")]


def product(*args, **kw):
    from baton.kernels.dense_warpgroups import dense_product  # not there without Triton
    return dense_product(*args, **kw)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows,columns,depth,dtype", [
    (129, 128, 64, torch.bfloat16), (1000, 4096, 4096, torch.bfloat16), (8191, 1536, 2048, torch.float16),
    (8192, 14336, 4096, torch.bfloat16), (1, 8, 8, torch.bfloat16), (1030, 3080, 1032, torch.bfloat16),
    (5000, 4864, 896, torch.bfloat16), (4097, 264, 14336, torch.float16),
], ids=str)
def test_a_product_equals_torchs(rows, columns, depth, dtype, gated):
    """Whole tiles and parts of them, in rows, columns and depth; other bands; the same bits each time; no row's result
    depends on the others."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, depth, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(columns * (1 + gated), depth, generator=generator, device="cuda").mul(depth**-0.5).to(dtype)
    got = product(x, weight, gated=gated)
    want = x.float() @ weight.float().T
    if gated:
        gate, up = want.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    assert got.dtype == dtype
    assert (got.float() - want).norm() <= 0.004 * want.norm()
    assert (got.float() - want).abs().max() <= 0.02 * want.abs().max()
    for _ in range(3):
        assert torch.equal(product(x, weight, gated=gated), got)
    some = x[rows // 2:]
    assert torch.equal(product(some, weight, gated=gated), got[rows // 2:])
