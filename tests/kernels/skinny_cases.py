"""Products of few rows against their twin, on a GPU or under the interpreter; collected as kernel_cases.py is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton.common.quantization.float8 import quantize_channels
from baton.kernels import reference
from baton.kernels.arguments import Float8Format
from baton.kernels.gemm.persistent_tiles import streamed_tile
from baton.kernels.gemm.small_m_matmul import skinny_matmul
from baton.kernels.gemm.small_m_tiles import SmallMTile, tile_for
from baton.kernels.rowwise.fp8_quantize import quantize
from baton.kernels.rowwise.split_k_rmsnorm import joined_rmsnorm
from baton.tests.kernels.kernel_cases import DEVICE, GPU, each_dtype, pytestmark, random

__all__ = ["pytestmark"]
KINDS = ["plain", "row", "one"]


def product_of(kind: str, rows: int, out: int, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """What ``skinny_matmul`` takes, ``x`` in a wider row."""
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
    """Of whole tiles and of others, by the tile that is chosen and in pieces."""
    held, bias = product_of(kind, rows, out, width, dtype), random(out, dtype=dtype, seed=2)
    if GPU and kind != "plain":  # tensor cores add up float8 products with 14 bits
        atol, rtol = 0.05, 1e-2
    for tile, some in ((None, None), (SmallMTile(16, 128, 3, 4, 3, 4096), bias), (SmallMTile(32, 64, 1, 4, 3), bias)):
        got, want = skinny_matmul(bias=some, tile=tile, **held), reference.skinny_matmul(bias=some, **held)
        torch.testing.assert_close(got, want, atol=atol * width**0.5, rtol=rtol)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_those_beside_it(kind):
    held = product_of(kind, 16, 40, 256, torch.float16)
    fewer = {name: held[name][3:5] for name in ("x", "x_scale") if name in held and len(held[name]) == 16}
    assert torch.equal(skinny_matmul(**held)[3:5], skinny_matmul(**{**held, **fewer}))


@each_dtype
@pytest.mark.parametrize("rows,out,width", [(1, 64, 128), (1, 60, 1100), (3, 60, 304), (17, 64, 128)])
def test_gates_beside_ups_end_in_the_activation(rows, out, width, dtype, atol, rtol):
    """As by a kernel behind the product; of whole tiles and of others, in pieces and without."""
    held, bias = product_of("plain", rows, out, width, dtype), random(out, dtype=dtype, seed=2)
    for tile in (None, SmallMTile(16, 128, 3, 4, 3, 4096), SmallMTile(32, 64, 1, 4, 3)):
        got = skinny_matmul(bias=bias, tile=tile, gated=True, **held)
        want = reference.silu_and_mul(skinny_matmul(bias=bias, tile=tile, **held))
        assert got.shape == (rows, out // 2)
        torch.testing.assert_close(got, want, atol=atol * width, rtol=rtol)


def test_no_rows():
    assert skinny_matmul(**product_of("row", 0, 32, 64, torch.float16)).shape == (0, 32)


@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (4096, 14336), (768, 4096), (1024, 2048), (64, 128)])
def test_tiles_keep_a_gpu_busy_and_have_work_for_every_piece(shape):
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        tile = tile_for(8, *shape, dtype)
        assert tile == tile_for(2, *shape, dtype) == tile_for(16, *shape, dtype)
        programs, steps = shape[0] / tile.columns * tile.pieces, shape[1] / tile.depth
        assert tile.pieces == 1 or steps / tile.pieces >= 4
        assert programs >= 64 or steps / tile.pieces < 8 or tile.pieces == 8
        assert not tile.ahead or programs <= 264


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (2048, 14336),
                                   (128256, 4096)])
def test_tiles_of_large_products_fit_a_multiprocessor_and_sum_alike(shape):
    """Numbers of rows change how many stages there are, and what is fetched; not how a row is summed up."""
    some = [(rows, tile_for(rows, *shape, torch.bfloat16)) for rows in (2, 16, 17, 32, 33, 64)]
    for rows, tile in some:
        tall = 16 if rows <= 16 else 32 if rows <= 32 else 64
        assert tile.stages * (tile.columns + tall) * tile.depth * 2 <= 227 << 10
        assert -(-shape[0] // tile.columns) * tile.pieces <= 132 or tile.pieces == 1
    assert len({(tile.columns, tile.depth, tile.pieces, tile.warps) for _, tile in some}) == 1


@each_dtype
@pytest.mark.parametrize("rows,width", [(1, 48), (3, 600)])
def test_a_norm_adds_up_pieces(rows, width, dtype, atol, rtol):
    """Of more rows than there are."""
    parts = random(3, 5, width, dtype=torch.float32)
    residual, gain = random(rows, width, dtype=dtype, seed=1), random(width, dtype=dtype, seed=2)
    want = reference.rmsnorm(parts.sum(0)[:rows].to(dtype), gain, 1e-6, residual)
    for got, wanted in zip(joined_rmsnorm(parts, gain, 1e-6, residual), want):
        torch.testing.assert_close(got, wanted, atol=4 * atol, rtol=rtol)


@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)])
def test_streamed_tiles_fit_a_multiprocessor_and_sum_alike(shape):
    tiles = [(rows, streamed_tile(rows, *shape)) for rows in (1, 8, 9, 16, 17, 32, 33, 64)]
    for rows, tile in tiles:
        assert (tile is None) == (rows > 32 and shape[0] > 10_000)
        if tile is not None:
            assert tile.stages >= 4 and tile.tall(rows) >= rows
            assert tile.stages * (tile.block + tile.split * tile.tall(rows)) * tile.depth * 2 <= 208 << 10
            assert shape[1] % (8 * tile.split) == 0 and tile.split == 2
    assert streamed_tile(65, *shape) is None
