"""Products of deterministic mode on a GPU: a row's bits do not depend on the number of rows, nor on the tile."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from baton.kernels.gemm.batch_invariant_matmul import batch_invariant_matmul
from baton.kernels.gemm.dense_matmul import dense_matmul
from baton.kernels.rowwise.silu_and_mul import silu_and_mul
from baton.kernels.tuning.gemm import InvariantTile
from baton.kernels.tuning.policy import set_batch_invariant

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS = (1, 2, 9, 17, 33, 64, 65, 128, 129, 200, 257, 512, 600, 1024, 2000, 4096)
SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (1000, 2048), (96, 328), (512, 256), (24, 72)]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    set_batch_invariant(True)
    yield
    set_batch_invariant(False)


def random(*sizes: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(sizes, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
    return made.mul_(sizes[-1]**-0.25).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out,width", SHAPES)
def test_a_row_has_the_same_bits_in_any_batch(out, width, dtype):
    x, weight = random(max(ROWS), width, seed=0, dtype=dtype), random(out, width, seed=1, dtype=dtype)
    bias = random(out, seed=2, dtype=dtype)
    one_tile = batch_invariant_matmul(x, weight, None, InvariantTile(64, 64, 64, 4, 3))
    biased = batch_invariant_matmul(x, weight, bias, InvariantTile(64, 64, 64, 4, 3))
    torch.testing.assert_close(one_tile.float(), x.float() @ weight.float().T, atol=0.05, rtol=0.02)
    for rows in ROWS:
        assert torch.equal(dense_matmul(x[:rows], weight), one_tile[:rows]), rows
        assert torch.equal(dense_matmul(x[:rows], weight, bias), biased[:rows]), rows
        if out % 16 == 0:
            assert torch.equal(dense_matmul(x[:rows], weight, gated=True), silu_and_mul(one_tile[:rows])), rows


def test_rows_that_are_parts_of_others_have_the_same_bits():
    """Strides and beginnings that TMA cannot read from."""
    wide, weight = random(300, 1025, seed=0, dtype=torch.bfloat16), random(512, 1024, seed=1, dtype=torch.bfloat16)
    part = wide[:, 1:]
    for rows in (1, 40, 100, 300):
        assert torch.equal(dense_matmul(part[:rows], weight), dense_matmul(part[:rows].contiguous(), weight)), rows
