"""One rank's part of a low-latency dispatch and combine, after the other ranks' rows have arrived; collected by
test_kernels_interpreted.py."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import _triton, reference
from baton.kernels.comm.all_reduce import SLOT_VALUES
from baton.kernels.comm.gather_scatter_norm import fits_slots, reduce_scatter_rmsnorm, rmsnorm_all_gather
from baton.tests.kernels.all_reduce_cases import Fakes, parts_of

pytestmark = pytest.mark.skipif(not _triton.INTERPRETED, reason="needs TRITON_INTERPRET=1")
RANKS = [(0, 2, 0), (1, 2, 3), (2, 4, 1), (7, 8, 0)]


def arrived(fakes: Fakes, parts: list[torch.Tensor]) -> None:
    """Every other rank has sent these rows."""
    for source, part in enumerate(parts):
        for row, values in enumerate(part if source != fakes.peers.rank else ()):
            fakes.area(fakes.peers.rank, row, source)[:len(values)] = values.view(torch.int16)


def sent(fakes: Fakes, to: int, rows: int, width: int) -> torch.Tensor:
    return torch.stack([fakes.area(to, row, fakes.peers.rank)[:width] for row in range(rows)]).view(torch.float16)


def check_turns(fakes: Fakes, phases: int, rows: int) -> None:
    assert fakes.peers.phases[:rows + 1].tolist() == [phases + 1] * rows + [phases]
    assert fakes.is_empty, "the next turn but one would take these values for its own"


@pytest.mark.parametrize("rank,size,phases", RANKS)
@pytest.mark.parametrize("rows,width", [(1, 64), (5, 96)])
def test_rows_meet_behind_the_norm(rank, size, phases, rows, width):
    parts, residuals = parts_of(size, rows, width), parts_of(size, rows, width)[::-1]
    weight = torch.rand(width).half()
    wanted, totals = reference.rmsnorm_all_gather(parts, residuals, weight, 1e-5)
    fakes = Fakes(rank, size, phases)
    arrived(fakes, list(wanted.chunk(size)))
    y, total = rmsnorm_all_gather(parts[rank], residuals[rank], weight, 1e-5, fakes.peers, max_polls=1)
    assert torch.equal(total, totals[rank]) and torch.allclose(y, wanted, atol=2e-3, rtol=2e-3)
    for other in set(range(size)) - {rank}:
        assert torch.equal(sent(fakes, other, rows, width), y.chunk(size)[rank]), "all ranks have the same bits"
    check_turns(fakes, phases, rows)


@pytest.mark.parametrize("rank,size,phases", RANKS)
@pytest.mark.parametrize("rows,width,in_two", [(1, 64, False), (5, 96, True)])
def test_rows_part_and_are_normed(rank, size, phases, rows, width, in_two):
    parts, residual = parts_of(size, rows * size, width), torch.randn(rows, width).half()
    own, more = parts[rank], torch.randn(rows * size, width).half() if in_two else None
    parts[rank] = own if more is None else own + more
    weight = torch.rand(width).half()
    fakes = Fakes(rank, size, phases)
    arrived(fakes, [part.chunk(size)[rank] for part in parts])
    y, total = reduce_scatter_rmsnorm(own, more, residual, weight, 1e-5, fakes.peers, max_polls=1)
    wanted, wanted_total = reference.reduce_scatter_rmsnorm(parts, residual, weight, 1e-5, rank)
    assert torch.equal(total, wanted_total) and torch.allclose(y, wanted, atol=2e-3, rtol=2e-3)
    for other in set(range(size)) - {rank}:
        assert torch.equal(sent(fakes, other, rows, width), parts[rank].chunk(size)[other])
    check_turns(fakes, phases, rows)


def test_a_row_of_zeros_arrives():
    """Its norm is zeros, whose sign the weight may flip: a negative zero means that nothing has arrived."""
    fakes, zeros = Fakes(0, 2), torch.zeros(1, 64).half()
    y, _ = rmsnorm_all_gather(zeros, zeros, -torch.ones(64).half(), 1e-5, fakes.peers, max_polls=3)
    assert not sent(fakes, 1, 1, 64).view(torch.int16).any() and not y[:1].view(torch.int16).any()


def test_rows_that_do_not_fit():
    peers = Fakes(0, 2).peers
    assert fits_slots(peers.slots, SLOT_VALUES, peers)
    assert not (fits_slots(peers.slots + 1, 64,
                           peers) or fits_slots(1, SLOT_VALUES + 8, peers) or fits_slots(0, 64, peers))
