"""Products of few rows against their twin, on a GPU or under the interpreter; collected as kernel_cases.py is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.common.quantization.float8 import quantize_channels
from baton.kernels import reference
from baton.kernels.arguments import Float8Format
from baton.kernels.gemm.small_m_matmul import small_m_matmul
from baton.kernels.rowwise.fp8_quantize import quantize
from baton.kernels.rowwise.split_k_rmsnorm import split_k_rmsnorm
from baton.kernels.tuning.gemm import SmallMTile
from baton.tests.kernels.kernel_cases import DEVICE, GPU, each_dtype, pytestmark, random

__all__ = ["pytestmark"]
KINDS = ["plain", "row", "one"]


def product_of(kind: str, rows: int, out: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of ``small_m_matmul``, with ``x`` in wider rows."""
    wide, x = random(out, width, dtype=torch.float32, seed=1), random(rows, width + 16, dtype=dtype)[:, :width]
    if kind == "plain":
        return {"x": x, "weight": wide.to(dtype)}
    given = quantize(x, Float8Format(width, torch.full((1,), 0.01, device=DEVICE) if kind == "one" else None))
    weight, scale = quantize_channels(wide)
    return {"x": given.values, "x_scale": given.scale, "weight": weight, "dtype": dtype,
            "scale": scale if kind == "row" else scale[:1].clone()}


@each_dtype
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows,out,width", [(1, 32, 128), (1, 30, 1100), (17, 150, 304)])
def test_products_equal_the_twin(rows, out, width, kind, dtype, atol, rtol):
    """With whole tiles and partial ones, by the tile that is chosen and with splits."""
    held, bias = product_of(kind, rows, out, width, dtype), random(out, dtype=dtype, seed=2)
    if GPU and kind != "plain":  # tensor cores add up float8 products with 14 bits
        atol, rtol = 0.05, 1e-2
    for tile, some in ((None, None), (SmallMTile(16, 128, 3, 4, 3, 4096), bias), (SmallMTile(32, 64, 1, 4, 3), bias)):
        got, want = small_m_matmul(bias=some, tile=tile, **held), reference.small_m_matmul(bias=some, **held)
        torch.testing.assert_close(got, want, atol=atol * width**0.5, rtol=rtol)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_those_beside_it(kind):
    held = product_of(kind, 16, 40, 256, torch.float16)
    fewer = {name: held[name][3:5] for name in ("x", "x_scale") if name in held and len(held[name]) == 16}
    assert torch.equal(small_m_matmul(**held)[3:5], small_m_matmul(**{**held, **fewer}))


@each_dtype
@pytest.mark.parametrize("rows,out,width", [(1, 64, 128), (1, 60, 1100), (3, 60, 304), (17, 64, 128)])
def test_gates_beside_ups_end_in_the_activation(rows, out, width, dtype, atol, rtol):
    """The result is that of a separate activation kernel, with whole and partial tiles, with and without splits."""
    held, bias = product_of("plain", rows, out, width, dtype), random(out, dtype=dtype, seed=2)
    for tile in (None, SmallMTile(16, 128, 3, 4, 3, 4096), SmallMTile(32, 64, 1, 4, 3)):
        got = small_m_matmul(bias=bias, tile=tile, gated=True, **held)
        want = reference.silu_and_mul(small_m_matmul(bias=bias, tile=tile, **held))
        assert got.shape == (rows, out // 2)
        torch.testing.assert_close(got, want, atol=atol * width, rtol=rtol)


def test_no_rows():
    assert small_m_matmul(**product_of("row", 0, 32, 64, torch.float16)).shape == (0, 32)


@each_dtype
@pytest.mark.parametrize("rows,width", [(1, 48), (3, 600)])
def test_a_norm_adds_up_pieces(rows, width, dtype, atol, rtol):
    """Partial sums have more rows than the residual."""
    parts = random(3, 5, width, dtype=torch.float32)
    residual, gain = random(rows, width, dtype=dtype, seed=1), random(width, dtype=dtype, seed=2)
    want = reference.rmsnorm(parts.sum(0)[:rows].to(dtype), gain, 1e-6, residual)
    for got, wanted in zip(split_k_rmsnorm(parts, gain, 1e-6, residual), want):
        torch.testing.assert_close(got, wanted, atol=4 * atol, rtol=rtol)
