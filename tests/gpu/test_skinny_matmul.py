"""Products of few rows on a GPU: against plain torch, in graphs of launches that start before the last has ended."""

from __future__ import annotations

import pytest
import torch

from baton.common.quantization.float8 import quantize_blocks, quantize_channels
from baton.kernels import reference
from baton.kernels.skinny_matmul import skinny_matmul

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = torch.device("cuda", 0)
KINDS = ["plain", "row", "tensor", "block"]


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(sizes, device=CUDA, generator=torch.Generator(CUDA).manual_seed(seed))


def rms(x: torch.Tensor) -> float:
    return float(x.float().square().mean().sqrt())


def weight_of(kind: str, out: int, width: int, seed: int = 1) -> dict[str, object]:
    """What ``skinny_matmul`` takes beside the rows."""
    wide = random(out, width, seed=seed) * width**-0.5
    if kind == "plain":
        return {"weight": wide.bfloat16()}
    if kind == "block":
        weight, scale = quantize_blocks(wide, (128, 128))
        return {"weight": weight, "scale": scale, "block": (128, 128)}
    weight, scale = quantize_channels(wide)
    return {"weight": weight, "scale": scale if kind == "row" else scale[:1].clone()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width,out", [(4096, 6144), (14336, 4096), (1024, 1024), (1000, 130)])
def test_products_equal_torch_and_rows_do_not_depend_on_their_number(kind, width, out):
    held = weight_of(kind, out, width)
    x, bias = random(64, width).bfloat16(), random(out, seed=2).bfloat16()
    one = skinny_matmul(x[:1], bias=bias, **held)
    for rows in (1, 2, 15, 16, 17, 33, 64):
        got = skinny_matmul(x[:rows], bias=bias, **held)
        want = reference.skinny_matmul(x[:rows], bias=bias, dtype=torch.float32, **held)
        assert rms(got - want) < 0.005 * rms(want)
        if rows <= 16:
            assert torch.equal(got[:1], one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_chain_in_a_graph_equals_launches_one_by_one(kind, rows):
    """Each product takes the last one's result, and starts before that is there."""
    chain = [weight_of(kind, 4096, 4096, seed) for seed in range(4)] * 6
    x = random(rows, 4096).bfloat16()
    want = x
    for held in chain:
        want = skinny_matmul(want, **held)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = x
        for held in chain:
            got = skinny_matmul(got, **held)
    for _ in range(10):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)
