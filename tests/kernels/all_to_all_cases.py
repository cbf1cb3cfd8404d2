"""One rank's part of all-to-all dispatch and combine, after the other ranks' parts have arrived; collected by
test_kernels_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import _triton, reference
from baton.kernels.arguments import Float8Rows
from baton.kernels.comm.all_to_all import all_to_all_combine, all_to_all_dispatch, reduce_combined
from baton.kernels.comm.dispatch_buffers import GROUP, DispatchLayout, DispatchMemory
from baton.kernels.tuning.all_to_all import CopyLaunch

pytestmark = pytest.mark.skipif(not _triton.INTERPRETED, reason="needs TRITON_INTERPRET=1")
PLACES, CHOICES = 4, 3
COUNTS = {2: [4, 3], 4: [2, 0, 3, 1]}


class Ranks:
    """Ranks of one process, one after the other: the counters of all others are set before a rank polls them."""

    def __init__(self, size: int, width: int, *, float8: bool = False):
        layout = DispatchLayout(size, max(COUNTS[size]) + 2, width, CHOICES, float8, torch.float16)
        buffers = [torch.zeros(layout.nbytes, dtype=torch.uint8) for _ in range(size)]
        bases = torch.tensor([buffer.data_ptr() for buffer in buffers])
        self.all = [DispatchMemory(rank, layout, buffer, bases) for rank, buffer in enumerate(buffers)]
        self.counts, self.most = COUNTS[size], max(COUNTS[size])

    def counters(self, rank: int) -> torch.Tensor:
        return self.all[rank].view(0, 2, len(self.all), dtype=torch.int32)

    def one(self, rank: int, phase: int, programs: int, work) -> None:
        """Runs ``work`` of a rank with the other ranks' counters set, and checks that it increments its own."""
        others = torch.arange(len(self.all)) != rank
        self.counters(rank)[phase, others] = programs
        work(self.all[rank])
        assert not self.counters(rank)[phase].any(), "the next turn finds them empty"
        for other in others.nonzero()[:, 0].tolist():
            assert self.counters(other)[phase, rank] == programs
            self.counters(other)[phase, rank] = 0


def given(ranks: Ranks, width: int) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Rows, physical experts and weights; the last token of the largest part has all its experts on one rank."""
    generator = torch.Generator().manual_seed(width)
    rows = [torch.randn(count, width, generator=generator).half() for count in ranks.counts]
    every = len(ranks.counts) * PLACES
    numbers = [torch.stack([torch.randperm(every, generator=generator)[:CHOICES] for _ in range(count)])
               if count else torch.empty(0, CHOICES, dtype=torch.int64) for count in ranks.counts]
    numbers[ranks.counts.index(ranks.most)][-1] = torch.tensor([6, 4, 5])
    weights = [torch.rand(count, CHOICES, generator=generator) for count in ranks.counts]
    return rows, numbers, weights


@pytest.mark.parametrize("size,width,float8", [(2, 64, False), (4, 2304, False), (2, 384, True)])
def test_tokens_go_to_their_experts_and_come_back(size, width, float8):
    ranks = Ranks(size, width, float8=float8)
    rows, numbers, weights = given(ranks, width)
    for rank in range(size):
        ranks.one(rank, 0, 2, lambda peers, rank=rank: all_to_all_dispatch(
            rows[rank], numbers[rank], weights[rank], ranks.most, PLACES, peers, max_polls=1,
            launch=CopyLaunch(2, 2 * _triton.triton.next_power_of_2(min(width, 2048)), 4)))
    parts = []
    for rank, peers in enumerate(ranks.all):
        places, scored = peers.choices(ranks.most)
        wanted, ids = reference.all_to_all_dispatch(rows, numbers, ranks.most, PLACES, rank)
        assert torch.equal(places, ids)
        found = peers.tokens(ranks.most)
        some = (ids >= 0).any(1)
        if isinstance(found, Float8Rows):
            values, scale = reference.quantize_groups(wanted[some], GROUP)
            assert torch.equal(found.values[some].view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(found.scale[some], scale)
        else:
            assert torch.equal(found[some], wanted[some])
        made = torch.randn(places.numel(), width).half()
        positions = torch.randperm(places.numel(), dtype=torch.int32) if rank % 2 else None
        ranks.one(rank, 1, 5, lambda peers, made=made, positions=positions: all_to_all_combine(
            made, positions, ranks.most, PLACES, peers, max_polls=1, launch=CopyLaunch(5, 2048, 4)))
        combined = reference.all_to_all_combine(made, positions, places, scored, PLACES)
        parts.append(combined.view(size, ranks.most, width))
    for rank, peers in enumerate(ranks.all):
        count = ranks.counts[rank]
        residual, more, weight = torch.randn(count, width).half(), torch.randn(count, width).half(), torch.rand(width)
        own = [part[rank, :count] for part in parts]
        total, none = reduce_combined(numbers[rank], PLACES, peers)
        assert none is None and torch.equal(total, reference.all_reduce(own))
        total, y = reduce_combined(numbers[rank], PLACES, peers, more, residual, weight.half(), 1e-5)
        assert y is not None
        normed, summed = reference.all_reduce_rmsnorm([*own, more], residual, weight.half(), 1e-5)
        assert torch.equal(total, summed) and torch.allclose(y, normed, atol=2e-3, rtol=2e-3)


def test_rows_go_only_where_they_have_an_expert():
    """Rows without an expert on a rank are not written there."""
    ranks = Ranks(2, 64)
    rows, numbers, weights = given(ranks, 64)
    ranks.one(0, 0, 2, lambda peers: all_to_all_dispatch(rows[0], numbers[0], weights[0], ranks.most, PLACES, peers,
                                                   max_polls=1, launch=CopyLaunch(2, 128, 4)))
    for rank in range(2):
        found = ranks.all[rank].tokens(ranks.most)[:ranks.counts[0]]
        wanted = (numbers[0] // PLACES == rank).any(1)
        assert torch.equal(found.any(1), wanted)
        assert not wanted.all() or rank == 1
