"""Products of few rows against their twin, on a GPU or under the interpreter; collected as kernel_cases.py is."""

from __future__ import annotations

import pytest
import torch

from baton.common.quantization.float8 import quantize_blocks, quantize_channels
from baton.kernels import reference
from baton.kernels.skinny_matmul import skinny_matmul
from baton.kernels.skinny_tiles import SkinnyTile
from baton.tests.kernels.kernel_cases import each_dtype, pytestmark, random

__all__ = ["pytestmark"]
KINDS = ["plain", "row", "tensor", "block"]


def held_as(kind: str, out: int, width: int, dtype: torch.dtype) -> dict[str, object]:
    """What ``skinny_matmul`` takes beside the rows."""
    wide = random(out, width, dtype=torch.float32, seed=1)
    if kind == "plain":
        return {"weight": wide.to(dtype)}
    if kind == "block":
        weight, scale = quantize_blocks(wide, (128, 128))
        return {"weight": weight, "scale": scale, "block": (128, 128)}
    weight, scale = quantize_channels(wide)
    return {"weight": weight, "scale": scale if kind == "row" else scale[:1].clone()}


@each_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows,out,width", [(1, 32, 128), (17, 150, 300)])
def test_products_equal_the_twin(rows, out, width, kind, dtype, atol, rtol):
    """Of whole tiles and of others, by the tile that is chosen and in pieces."""
    held = held_as(kind, out, width, dtype)
    x, bias = random(rows, width + 8, dtype=dtype)[:, :width], random(out, dtype=dtype, seed=2)
    for tile, some in ((None, None), (SkinnyTile(16, 128, 3, 4, 3, 512), bias)):
        got = skinny_matmul(x, bias=some, tile=tile, **held)
        want = reference.skinny_matmul(x, bias=some, **held)
        torch.testing.assert_close(got, want, atol=atol * width**0.5, rtol=rtol)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_those_beside_it(kind):
    held = held_as(kind, 40, 256, torch.float16)
    x = random(16, 256, dtype=torch.float16)
    assert torch.equal(skinny_matmul(x, **held)[3:4], skinny_matmul(x[3:4], **held))


def test_results_of_another_type_are_rounded_as_ever():
    held = held_as("plain", 40, 256, torch.float16)
    x = random(2, 256, dtype=torch.float16)
    got = skinny_matmul(x, dtype=torch.float32, **held)
    assert got.dtype == torch.float32 and torch.equal(got, skinny_matmul(x, **held).float())


def test_no_rows():
    assert skinny_matmul(random(0, 64, dtype=torch.float16), **held_as("row", 32, 64, torch.float16)).shape == (0, 32)
