"""Dispatch and combine through peers' memory with all ranks on one GPU; see test_peer_sum.py."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import reference
from baton.kernels.comm.all_reduce import EMPTY
from baton.kernels.comm.gather_scatter_norm import peer_norm_gather, peer_scatter_norm
from baton.tests.gpu.test_peer_sum import PATIENCE, Ranks, warm_up

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("rows,width", [(1, 2048), (24, 2048), (3, 7168), (12, 5120)])
def test_rows_meet_and_part(size, rows, width):
    """Nine times one behind the other: no rank waits for another in between. One kernel of each rank runs ahead, and
    takes room too."""
    weight = torch.rand(width, device="cuda").bfloat16()
    parts, residuals, summands = ([torch.randn(count, width, device="cuda").bfloat16() for _ in range(size)]
                                  for count in (rows, rows, rows * size))

    def meet(ranks: Ranks, rank: int, patience: int) -> tuple[torch.Tensor, ...]:
        peers = ranks.peers[rank]
        met = peer_norm_gather(parts[rank], residuals[rank], weight, 1e-5, peers, patience=patience)
        return *met, *peer_scatter_norm(summands[rank], None, met[1], weight, 1e-5, peers, patience=patience)

    warm_up(size, meet)
    ranks = Ranks(size)
    found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(size)]
    ranks.run(lambda rank: found[rank].extend(meet(ranks, rank, PATIENCE) for _ in range(9)))
    wanted, totals = reference.peer_norm_gather(parts, residuals, weight, 1e-5)
    for rank, own in enumerate(found):
        normed, summed = reference.peer_scatter_norm(summands, totals[rank], weight, 1e-5, rank)
        for met, total, y, whole in own:
            assert torch.equal(total, totals[rank]) and torch.equal(whole, summed)
            assert torch.equal(met, found[0][0][0]), "ranks differ"
            assert torch.allclose(met.float(), wanted.float(), atol=2e-2, rtol=2e-2)
            assert torch.allclose(y.float(), normed.float(), atol=2e-2, rtol=2e-2)
    assert all(bool((buffer == EMPTY).all()) for buffer in ranks.peers[0].buffers)
