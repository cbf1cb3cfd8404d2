"""Low-latency dispatch and combine through symmetric memory with all ranks on one GPU; see test_all_reduce.py."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import reference
from baton.kernels.comm.all_reduce import EMPTY_BITS
from baton.kernels.comm.gather_scatter_norm import reduce_scatter_rmsnorm, rmsnorm_all_gather
from baton.tests.gpu.kernels.test_all_reduce import MAX_POLLS, Ranks, warm_up

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rows,width", [(1, 2048), (24, 2048), (3, 7168), (12, 5120)])
def test_rows_meet_and_part(size, rows, width):
    """Nine exchanges in a row: no rank waits for another in between. One kernel of each rank runs ahead, and is
    resident too."""
    weight = torch.rand(width, device="cuda").bfloat16()
    parts, residuals, summands = ([torch.randn(count, width, device="cuda").bfloat16() for _ in range(size)]
                                  for count in (rows, rows, rows * size))

    def meet(ranks: Ranks, rank: int, max_polls: int) -> tuple[torch.Tensor, ...]:
        peers = ranks.peers[rank]
        met = rmsnorm_all_gather(parts[rank], residuals[rank], weight, 1e-5, peers, max_polls=max_polls)
        return *met, *reduce_scatter_rmsnorm(summands[rank], None, met[1], weight, 1e-5, peers, max_polls=max_polls)

    warm_up(size, meet)
    ranks = Ranks(size)
    found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(size)]
    ranks.run(lambda rank: found[rank].extend(meet(ranks, rank, MAX_POLLS) for _ in range(9)))
    wanted, totals = reference.rmsnorm_all_gather(parts, residuals, weight, 1e-5)
    for rank, own in enumerate(found):
        normed, summed = reference.reduce_scatter_rmsnorm(summands, totals[rank], weight, 1e-5, rank)
        for met, total, y, whole in own:
            assert torch.equal(total, totals[rank]) and torch.equal(whole, summed)
            assert torch.equal(met, found[0][0][0]), "ranks differ"
            assert torch.allclose(met.float(), wanted.float(), atol=2e-2, rtol=2e-2)
            assert torch.allclose(y.float(), normed.float(), atol=2e-2, rtol=2e-2)
    assert all(bool((buffer == EMPTY_BITS).all()) for buffer in ranks.peers[0].buffers)
