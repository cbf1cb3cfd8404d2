"""Split-K products of 65 to 256 rows, with whole tiles and shared ones, on a Hopper GPU, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from baton.kernels import reference
from baton.kernels.gemm import dense_matmul
from baton.kernels.rowwise.rmsnorm import rmsnorm
from baton.kernels.rowwise.silu_and_mul import silu_and_mul
from baton.kernels.rowwise.split_k_rmsnorm import split_k_rmsnorm
from baton.kernels.tuning.gemm import SplitKTile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="Hopper's alone")]

TILES = [SplitKTile(256, 64, 64, 4), SplitKTile(128, 128, 64, 4), SplitKTile(128, 64, 64, 6)]
LEFT = [SplitKTile(256, 64, 64, 4, 4), SplitKTile(128, 64, 64, 6, 4), SplitKTile(256, 64, 64, 4, 3)]


def told(tile: SplitKTile) -> str:
    return f"{tile.rows}-{tile.height}-{tile.splits}"


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).bfloat16()


def product(*args, **kw):
    from baton.kernels.gemm.split_k_warp_specialized import split_k_matmul  # not there without Triton
    return split_k_matmul(*args, **kw)


@pytest.mark.parametrize("tile", TILES, ids=told)
@pytest.mark.parametrize("out,width", [(28672, 4096), (4096, 14336), (6144, 1024), (1008, 448), (144, 2048)])
def test_products_equal_torch(out, width, tile):
    """Plain and gated, of whole tiles and parts of them, in rows that lie in wider ones; the same bits each time; no
    row's result depends on the others."""
    weight = random(out, width, seed=1) * width**-0.5
    whole = random(256, width + 64)[:, :width]
    most = whole[:tile.rows]
    for gated in (False, True):
        last = product(most, weight, tile, gated=gated)
        for rows in (1, tile.rows // 2 + 1, 100, tile.rows - 1, tile.rows):
            x = most[:rows]
            want = linear(x.float(), weight.float())
            if gated:
                want = reference.silu_and_mul(want)
            got = product(x, weight, tile, gated=gated)
            assert (got.float() - want).norm() <= 0.006 * want.norm()
            assert torch.equal(got, last[:rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", LEFT, ids=told)
@pytest.mark.parametrize("out,width", [(4096, 4096), (4096, 14336), (1088, 256)])
def test_a_norm_adds_up_what_a_product_left(out, width, tile, dtype):
    """Splits of many steps and of one, and tiles of which half exists; the same bits each time."""
    from baton.kernels.gemm.split_k_warp_specialized import split_k_partials
    weight, whole = random(out, width, seed=1) * width**-0.5, random(tile.rows, width)
    gain = random(out, seed=3)
    for rows in (65, tile.rows - 3, tile.rows):
        x, residual = whole[:rows], random(rows, out, seed=2)
        parts = split_k_partials(x, weight, tile, dtype)
        assert parts.shape == (tile.splits, tile.rows, out)
        made = linear(x.float(), weight.float())
        assert (parts.float().sum(0)[:rows] - made).norm() <= (1e-3 if dtype == torch.float32 else 4e-3) * made.norm()
        want = reference.rmsnorm(made.bfloat16(), gain, 1e-5, residual)
        for a, b in zip(split_k_rmsnorm(parts, gain, 1e-5, residual), want):
            assert (a.float() - b.float()).norm() <= 0.006 * b.float().norm()
        for _ in range(5):
            assert torch.equal(split_k_partials(x, weight, tile, dtype)[:, :rows], parts[:, :rows])


@pytest.mark.parametrize("tile", TILES, ids=told)
def test_a_chain_of_launches_that_start_early_equals_itself(tile):
    """Each product takes the last one's result, in a CUDA graph: replays are equal, and so are eager launches."""
    weights = [random(4096, 4096, seed=seed) / 64 for seed in range(4)]
    x = random(tile.rows, 4096)

    def chain() -> torch.Tensor:
        y = x
        for _ in range(4):
            for weight in weights:
                y = product(y, weight, tile) + 0.1 * x
        return y

    want = chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain()
    for _ in range(10):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


@pytest.mark.parametrize("rows", [65, 128])
def test_products_of_a_layer_are_split_in_graphs_and_by_hand(rows):
    """Gates and ups, and what a norm follows: eager runs compute the bits of graphs, and nearly the library's."""
    x, residual, gain = random(rows, 4096), random(rows, 4096, seed=1), random(4096, seed=2)
    gate_up, down = random(28672, 4096, seed=3) / 64, random(4096, 14336, seed=4) / 120
    for gated, weight in ((True, gate_up), (False, down)):
        dense_matmul.compile_tiles(weight, gated=gated)

    def layer() -> tuple[torch.Tensor, torch.Tensor]:
        y = dense_matmul.dense_matmul(x, gate_up, gated=True)
        if dense_matmul.fuses_residual(y, down):
            return dense_matmul.matmul_rmsnorm(residual, y, down, gain, 1e-5)
        return rmsnorm(dense_matmul.dense_matmul(y, down), gain, 1e-5, residual)

    want = layer()
    y = silu_and_mul(linear(x, gate_up))
    library = rmsnorm(linear(y, down), gain, 1e-5, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layer()
        assert dense_matmul.fuses_residual(y, down)
    graph.replay()
    for a, b, other in zip(got, want, library):
        assert torch.equal(a, b) and not torch.equal(a, other)
        assert (a.float() - other.float()).norm() <= 0.01 * other.float().norm()
