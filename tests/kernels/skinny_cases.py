"""Products of few rows against their twin, on a GPU or under the interpreter; collected as kernel_cases.py is."""

from __future__ import annotations

import pytest
import torch

from baton.common.quantization.float8 import quantize_blocks, quantize_channels
from baton.kernels import reference
from baton.kernels.forms import Float8Form
from baton.kernels.fp8_quantize import quantize
from baton.kernels.skinny_matmul import skinny_matmul
from baton.kernels.skinny_tiles import SkinnyTile
from baton.tests.kernels.kernel_cases import DEVICE, GPU, each_dtype, pytestmark, random

__all__ = ["pytestmark"]
KINDS = ["plain", "row", "one", "block"]


def product_of(kind: str, rows: int, out: int, width: int, dtype: torch.dtype) -> dict[str, object]:
    """What ``skinny_matmul`` takes, ``x`` in a wider row."""
    wide, x = random(out, width, dtype=torch.float32, seed=1), random(rows, width + 16, dtype=dtype)[:, :width]
    if kind == "plain":
        return {"x": x, "weight": wide.to(dtype)}
    one = torch.full((1,), 0.01, device=DEVICE) if kind == "one" else None
    given = quantize(x, Float8Form(128 if kind == "block" else width, one))
    held = {"x": given.values, "x_scale": given.scale, "rounded": dtype}
    if kind == "block":
        weight, scale = quantize_blocks(wide, (128, 128))
        return {**held, "weight": weight, "scale": scale, "block": (128, 128)}
    weight, scale = quantize_channels(wide)
    return {**held, "weight": weight, "scale": scale if kind == "row" else scale[:1].clone()}


@each_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows,out,width", [(1, 32, 128), (17, 150, 304)])
def test_products_equal_the_twin(rows, out, width, kind, dtype, atol, rtol):
    """Of whole tiles and of others, by the tile that is chosen and in pieces."""
    held, bias = product_of(kind, rows, out, width, dtype), random(out, dtype=dtype, seed=2)
    if GPU and kind != "plain":  # tensor cores add up float8 products with 14 bits
        atol, rtol = 0.05, 1e-2
    for tile, some in ((None, None), (SkinnyTile(16, 128, 3, 4, 3, 512), bias)):
        got, want = skinny_matmul(bias=some, tile=tile, **held), reference.skinny_matmul(bias=some, **held)
        torch.testing.assert_close(got, want, atol=atol * width**0.5, rtol=rtol)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_those_beside_it(kind):
    held = product_of(kind, 16, 40, 256, torch.float16)
    alone = {name: held[name][3:4] for name in ("x", "x_scale") if name in held and len(held[name]) == 16}
    assert torch.equal(skinny_matmul(**held)[3:4], skinny_matmul(**{**held, **alone}))


def test_results_of_another_type_are_rounded_as_ever():
    held = product_of("plain", 2, 40, 256, torch.float16)
    got = skinny_matmul(**held, dtype=torch.float32)
    assert got.dtype == torch.float32 and torch.equal(got, skinny_matmul(**held).float())


def test_no_rows():
    assert skinny_matmul(**product_of("row", 0, 32, 64, torch.float16)).shape == (0, 32)
