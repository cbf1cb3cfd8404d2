"""Int8 kernels against their twins, on a GPU or under the interpreter; collected as kernel_cases.py is."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import reference
from baton.kernels.arguments import Int8Format, Int8Rows, Scales
from baton.kernels.float8.fp8_matmul import fp8_matmul
from baton.kernels.int8.int8_matmul import int8_matmul
from baton.kernels.moe.moe_experts import moe_experts
from baton.kernels.rowwise.int8_quantize import quantize_int8
from baton.kernels.tuning.moe import Tile, Tiles
from baton.kernels.tuning.split_tile import SplitTile
from baton.tests.kernels.kernel_cases import DEVICE, each_dtype, pytestmark, random
from baton.tests.kernels.moe_cases import choices_of

__all__ = ["pytestmark"]


def int8(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8).to(DEVICE)


@each_dtype
@pytest.mark.parametrize("kind", ["dynamic", "dynamic, asymmetric", "static", "static, asymmetric"])
@pytest.mark.parametrize("rows,width", [(1, 7), (3, 1502)])
@pytest.mark.parametrize("gated", [False, True])
def test_quantize(kind, rows, width, gated, dtype, atol, rtol):
    """A value may fall to the other of two neighbours where a division is rounded otherwise."""
    x = random(rows, 2 * width + 8 if gated else width + 8, dtype=dtype)[:, :2 * width if gated else width] * 3 + 1
    known = torch.tensor([0.03], device=DEVICE) if "static" in kind else None
    form = Int8Format("asym" in kind, known, None if known is None or "asym" not in kind else known * -20)
    got, want = quantize_int8(x, form, gated=gated), reference.quantize_int8(
        reference.silu_and_mul(x) if gated else x, form)
    assert got.values.shape == (rows, width) and got.dtype == dtype
    apart = (got.values.int() - want.values.int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01
    torch.testing.assert_close(got.scale, want.scale, atol=1e-6, rtol=1e-3)
    if "asym" in kind:
        torch.testing.assert_close(got.shift, want.shift, atol=1e-6, rtol=1e-3)
    assert not quantize_int8(torch.zeros_like(x), Int8Format(), gated=gated).values.any()


@pytest.mark.parametrize("rows,out,width,splits", [(1, 48, 64, 1), (37, 72, 272, 2), (130, 40, 48, 1)])
def test_products_are_exact(rows, out, width, splits):
    """Sums of int32: scales of one give integers."""
    x, w = int8(rows, width), int8(out, width, seed=1)
    ones = torch.ones(rows, 1, device=DEVICE), torch.ones(out, device=DEVICE)
    tile = SplitTile(64, 32, 128, splits, 4, 2)
    got = fp8_matmul(x, ones[0], w, ones[1], "row", torch.float32, tile=tile)
    assert torch.equal(got, (x.double() @ w.double().T).float())


@pytest.mark.parametrize("shifted", [False, True])
def test_int8_matmul(shifted):
    x, w = int8(5, 64), int8(48, 64, seed=1)
    scale, weight_scale = torch.rand(5, 1, device=DEVICE) * 0.01, torch.rand(48, device=DEVICE) * 0.01
    rows = Int8Rows(x, scale, scale * 7 if shifted else None, torch.float16)
    sums = w.float().sum(1) * weight_scale
    got, want = int8_matmul(rows, w, weight_scale, sums), reference.int8_matmul(rows, w, weight_scale, sums)
    torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
    wide = x.float() * scale - (rows.shift if shifted else 0)
    torch.testing.assert_close(want.float(), wide @ (w.float() * weight_scale[:, None]).T, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("tokens,num_experts,choices,hidden,size", [(1, 4, 2, 64, 32), (19, 3, 2, 48, 40)])
@pytest.mark.parametrize("in_order", [True, False])
def test_moe_experts_in_int8(tokens, num_experts, choices, hidden, size, in_order):
    places = choices_of(tokens, num_experts, choices, 1)
    weights = torch.rand(places.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    x = random(tokens, hidden, dtype=torch.float16)
    gate_up, down = int8(num_experts, 2 * size, hidden, seed=2), int8(num_experts, hidden, size, seed=3)
    generator = torch.Generator().manual_seed(4)
    scales = Scales(*(torch.rand(num_experts, out, generator=generator).to(DEVICE) * 0.002 for out in (
        2 * size, hidden)), "row")
    want = reference.moe_experts(x, gate_up, down, places, weights, scales)
    tiles = Tiles(Tile(16, 16, 32, 2, 4, 2), Tile(16, 32, 32, 2, 4, 2), not in_order)
    got = moe_experts(x, gate_up, down, places, weights, scales, tiles)
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)
    assert want.std() > 0.02
