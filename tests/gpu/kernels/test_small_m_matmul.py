"""Products of few rows on a GPU: against plain torch, in graphs of launches that start before the last has ended."""

from __future__ import annotations

import pytest
import torch

from baton.common.quantization.float8 import quantize_channels
from baton.kernels import reference
from baton.kernels.arguments import Float8Format
from baton.kernels.gemm.small_m_matmul import small_m_matmul
from baton.kernels.rowwise.fp8_quantize import quantize
from baton.kernels.rowwise.silu_and_mul import silu_and_mul
from baton.kernels.tuning.gemm import PersistentTile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
KINDS = ["plain", "row", "tensor"]


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))


def rms(x: torch.Tensor) -> float:
    return float(x.float().square().mean().sqrt())


class Weight:
    """A weight of one kind, and its product with rows, which are quantized first if it is float8."""

    def __init__(self, kind: str, out: int, width: int, seed: int = 1):
        wide = random(out, width, seed=seed) * width**-0.5
        self.form: Float8Format | None = None
        self.scale: torch.Tensor | None = None
        self.weight = wide.bfloat16()
        if kind != "plain":
            self.weight, self.scale = quantize_channels(wide)
            self.form = Float8Format(width)
        if kind == "tensor":
            self.scale = self.scale[:1].clone()
            self.form = Float8Format(width, torch.full((1,), 0.01, device=CUDA))

    def times(self, x: torch.Tensor, bias: torch.Tensor | None = None, op=small_m_matmul) -> torch.Tensor:
        values, scale = (x, None) if self.form is None else quantize(x, self.form)[:2]
        return op(values, self.weight, bias, x_scale=scale, scale=self.scale, dtype=x.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width,out", [(4096, 6144), (14336, 4096), (2048, 1024), (1008, 144)])
def test_products_equal_torch_and_rows_do_not_depend_on_their_number(kind, width, out):
    weight = Weight(kind, out, width)
    x, bias = random(64, width).bfloat16(), random(out, seed=2).bfloat16()
    two = weight.times(x[:2], bias)
    for rows in (1, 2, 7, 16, 17, 32, 33, 64):
        got = weight.times(x[:rows], bias)
        want = weight.times(x[:rows], bias, reference.small_m_matmul)
        assert rms(got - want) < 0.01 * rms(want)
        if 2 <= rows <= 16:
            assert torch.equal(got[:2], two)


@pytest.mark.parametrize("rows", [1, 3, 16, 32, 50, 64])
@pytest.mark.parametrize("width,size", [(4096, 14336), (1024, 3072), (512, 72)])
def test_the_activation_is_the_one_of_a_kernel_behind(width, size, rows):
    weight = random(2 * size, width, seed=1).mul(width**-0.5).bfloat16()
    x, bias = random(rows, width).bfloat16(), random(2 * size, seed=2).bfloat16()
    got = small_m_matmul(x, weight, bias, gated=True)
    assert torch.equal(got, silu_and_mul(small_m_matmul(x, weight, bias)))
    want = reference.silu_and_mul(reference.small_m_matmul(x, weight, bias))
    assert rms(got - want) < 0.01 * rms(want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_a_chain_in_a_graph_equals_launches_one_by_one(kind, rows):
    """Each product takes the last one's result, and starts before that is written."""
    chain = [Weight(kind, 4096, 4096, seed) for seed in range(4)] * 6
    x = random(rows, 4096).bfloat16()
    want = x
    for weight in chain:
        want = weight.times(want)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = x
        for weight in chain:
            got = weight.times(got)
    for _ in range(10):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


hopper = pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
                            reason="needs a Hopper GPU")
PERSISTENT = [PersistentTile(64, 1, 64, 8), PersistentTile(64, 2, 64, 12), PersistentTile(64, 2, 128, 4, 2),
            PersistentTile(128, 4, 64, 5), PersistentTile(64, 4, 64, 8)]


@hopper
@pytest.mark.parametrize("tile", PERSISTENT)
@pytest.mark.parametrize("width,out", [(4096, 6144), (14336, 4096), (2048, 1024), (1056, 144), (64, 24)])
def test_persistent_products_equal_torch_and_rows_do_not_depend_on_their_number(width, out, tile):
    """Whole and partial tiles, fewer steps than may be in flight, and products that end in the activation."""
    weight = random(out, width, seed=1).mul(width**-0.5).bfloat16()
    x, bias = random(32, width).bfloat16(), random(out, seed=2).bfloat16()
    two = small_m_matmul(x[:2], weight, bias, tile=tile)
    for rows in (1, 2, 7, 8, 9, 16, 32):
        got = small_m_matmul(x[:rows], weight, bias, tile=tile)
        want = reference.small_m_matmul(x[:rows], weight, bias)
        assert rms(got - want) < 0.01 * rms(want)
        assert torch.equal(got[:2], two[:rows])
        assert torch.equal(small_m_matmul(x[:rows], weight, bias, tile=tile, gated=True), silu_and_mul(got))


@hopper
@pytest.mark.parametrize("tile", PERSISTENT)
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_persistent_products_in_a_chain_equal_launches_one_by_one(rows, tile):
    """Each loads its first weights before the last one's result is written."""
    weights = [random(4096, 4096, seed=seed).div(64).bfloat16() for seed in range(4)] * 6
    want = x = random(rows, 4096).bfloat16()
    for weight in weights:
        want = small_m_matmul(want, weight, tile=tile)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = x
        for weight in weights:
            got = small_m_matmul(got, weight, tile=tile)
    for _ in range(10):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)
