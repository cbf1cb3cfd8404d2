"""Collectives through symmetric memory with all ranks on one GPU, each on a stream of its own: this tests the kernels'
protocol, without the link. Waits are bounded, so that an error ends. All ranks' programs must be resident at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton.kernels import reference
from baton.kernels.comm.all_reduce import (
    EMPTY_BITS,
    MIN_SLOTS,
    PeerBuffers,
    all_gather,
    all_reduce,
    all_reduce_rmsnorm,
    buffer_values,
    reduce_scatter,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MAX_POLLS = 1 << 20
TWO_SHOTS = [(2, False), (2, True), (4, False), (4, True)]


class Ranks:
    def __init__(self, size: int):
        buffers = tuple(torch.full((buffer_values(size),), EMPTY_BITS, dtype=torch.int16, device="cuda")
                        for _ in range(size))
        self.peers = [PeerBuffers(rank, buffers, torch.zeros(MIN_SLOTS, dtype=torch.int32, device="cuda"))
                      for rank in range(size)]
        self.streams = [torch.cuda.Stream() for _ in range(size)]
        for stream in self.streams:  # what an allocation asks of the driver may wait for kernels that run
            with torch.cuda.stream(stream):
                kept = [torch.empty(900 << 10, dtype=torch.uint8, device="cuda") for _ in range(60)]
                del kept
        torch.cuda.synchronize()

    def run(self, work: Callable[[int], object]) -> None:
        """``work(rank)`` on every rank's stream at once; waits for all."""
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                work(rank)
        torch.cuda.synchronize()


def warm_up(size: int, work: Callable[[Ranks, int, int], object]) -> None:
    """Compile and load each rank's kernels: loading may wait for running kernels, which would wait for the others."""
    ranks = Ranks(size)
    for rank in range(size):
        work(ranks, rank, 2)
        torch.cuda.synchronize()


@pytest.mark.parametrize("size,two_shots", TWO_SHOTS)
def test_sums(size, two_shots):
    counts = [8, 4096, 100_000, 64, 262_144, 4104]

    def sum_all(ranks: Ranks, rank: int, max_polls: int, given: list[torch.Tensor] | None = None) -> None:
        for x in given or [torch.zeros(count, dtype=torch.bfloat16, device="cuda") for count in counts]:
            all_reduce(x, ranks.peers[rank], two_shots=two_shots, max_polls=max_polls)

    warm_up(size, sum_all)
    ranks = Ranks(size)
    parts = [[torch.randn(counts[i % 6], device="cuda").bfloat16() for i in range(60)] for _ in range(size)]
    sums = [[part.clone() for part in own] for own in parts]
    torch.cuda.synchronize()
    ranks.run(lambda rank: sum_all(ranks, rank, MAX_POLLS, sums[rank]))
    for i in range(60):
        wanted = reference.all_reduce([own[i] for own in parts])
        assert all(torch.equal(own[i], wanted) for own in sums), (i, counts[i % 6])
    assert all(bool((buffer == EMPTY_BITS).all()) for buffer in ranks.peers[0].buffers)


@pytest.mark.parametrize("size,two_shots", TWO_SHOTS)
@pytest.mark.parametrize("rows,width", [(1, 4096), (64, 4096), (3, 5120), (130, 2048), (7, 8192)])
def test_norms_of_sums(size, two_shots, rows, width):
    weight = torch.rand(width, device="cuda").bfloat16()
    residual = torch.randn(rows, width, device="cuda").bfloat16()

    def norm(ranks: Ranks, rank: int, max_polls: int, x: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        return all_reduce_rmsnorm(torch.zeros_like(residual) if x is None else x, residual, weight, 1e-5,
                                  ranks.peers[rank], two_shots=two_shots, max_polls=max_polls)

    warm_up(size, norm)
    ranks = Ranks(size)
    found: list[list[tuple[torch.Tensor, ...]]] = [[] for _ in range(size)]
    parts = [[torch.randn(rows, width, device="cuda").bfloat16() for _ in range(20)] for _ in range(size)]
    torch.cuda.synchronize()
    ranks.run(lambda rank: found[rank].extend(norm(ranks, rank, MAX_POLLS, x) for x in parts[rank]))
    for i in range(20):
        wanted, total = reference.all_reduce_rmsnorm([own[i] for own in parts], residual, weight, 1e-5)
        for own in found:
            assert torch.equal(own[i][1], total)
            assert torch.allclose(own[i][0].float(), wanted.float(), atol=2e-2, rtol=2e-2)
            assert torch.equal(own[i][0], found[0][i][0]), "ranks differ"


@pytest.mark.parametrize("size", [2, 4])
def test_rows_come_together_and_part(size):
    parts = [torch.randn(60, 4096, device="cuda").bfloat16() for _ in range(size)]

    def meet(ranks: Ranks, rank: int, max_polls: int) -> tuple[torch.Tensor, torch.Tensor]:
        gathered = all_gather(parts[rank], ranks.peers[rank], max_polls=max_polls)
        return gathered, reduce_scatter(gathered, ranks.peers[rank], max_polls=max_polls)

    warm_up(size, meet)
    ranks = Ranks(size)
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in range(size)]
    ranks.run(lambda rank: found[rank].extend(meet(ranks, rank, MAX_POLLS) for _ in range(9)))
    for rank, own in enumerate(found):
        wanted = reference.all_reduce([parts[rank]] * size)
        assert all(torch.equal(gathered, torch.cat(parts)) and torch.equal(summed, wanted) for gathered, summed in own)


def test_graphs_take_turns_with_other_sums():
    """An odd number of sums in a graph, so that each replay begins with the other phase than the last one."""
    size, counts = 2, [8, 100_000, 4104]
    ranks = Ranks(size)
    static = [[torch.zeros(count, dtype=torch.bfloat16, device="cuda") for count in counts] for _ in range(size)]
    beside = [torch.zeros(4096, dtype=torch.bfloat16, device="cuda") for _ in range(size)]

    def sum_all(ranks: Ranks, rank: int, max_polls: int) -> None:
        for x in [*static[rank], beside[rank]]:
            all_reduce(x, ranks.peers[rank], max_polls=max_polls)

    warm_up(size, sum_all)
    graphs, results = [], []
    for rank in range(size):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append([x.clone() for x in static[rank]])
            for x in results[-1]:
                all_reduce(x, ranks.peers[rank], max_polls=MAX_POLLS)
        graphs.append(graph)
    torch.cuda.synchronize()

    def phase(rank: int, value: int) -> None:
        for x in static[rank]:
            x.fill_(value + rank)
        graphs[rank].replay()
        if value % 3 == 0:
            all_reduce(beside[rank].fill_(1.0), ranks.peers[rank], max_polls=MAX_POLLS)

    for value in range(9):
        ranks.run(lambda rank, value=value: phase(rank, value))
        assert all(bool((x == 2 * value + 1).all()) for own in results for x in own)
        assert value % 3 or all(bool((x == size).all()) for x in beside)
