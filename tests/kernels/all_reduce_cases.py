"""One rank's part of the collectives, after the other ranks' parts have arrived; collected by
test_kernels_interpreted.py. tests/gpu/distributed/test_tensor_parallel.py runs several ranks at once."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import _triton, reference
from baton.kernels.comm.all_reduce import (
    EMPTY_BITS,
    MIN_SLOTS,
    SLOT_VALUES,
    PeerBuffers,
    all_gather,
    all_reduce,
    all_reduce_rmsnorm,
    buffer_values,
    reduce_scatter,
    rows_per_program,
)

pytestmark = pytest.mark.skipif(not _triton.INTERPRETED, reason="needs TRITON_INTERPRET=1")


class Fakes:
    """The buffers of ``size`` ranks in one process, as ``rank`` sees them in phase ``phases``."""

    def __init__(self, rank: int, size: int, phases: int = 0, slots: int = MIN_SLOTS):
        buffers = tuple(torch.full((buffer_values(size, slots),), EMPTY_BITS, dtype=torch.int16) for _ in range(size))
        self.peers = PeerBuffers(rank, buffers, torch.full((slots,), phases, dtype=torch.int32))
        self.place = phases % 2

    def area(self, of: int, slot: int, source: int) -> torch.Tensor:
        """The values that ``source`` sends to rank ``of``'s slot in this phase."""
        return self.peers.buffers[of].view(-1, 2, self.peers.size, SLOT_VALUES)[slot, self.place, source]

    def arrived(self, parts: list[torch.Tensor], tile: int) -> None:
        """Every other rank has sent its part [T, width] of one-shot sums, ``tile`` rows a program."""
        rank, block = self.peers.rank, _triton.triton.next_power_of_2(parts[0].shape[1])
        for source, part in enumerate(parts):
            for first in range(0, len(part), tile) if source != rank else ():
                rows = part[first:first + tile]
                area = self.area(rank, first // tile, source)[:tile * block].view(tile, block)
                area[:len(rows), :part.shape[1]] = rows.view(torch.int16)

    @property
    def is_empty(self) -> bool:
        return bool((self.peers.buffers[self.peers.rank] == EMPTY_BITS).all())


def parts_of(size: int, *shape: int) -> list[torch.Tensor]:
    return [torch.randn(*shape, generator=torch.Generator().manual_seed(r)).half() for r in range(size)]


@pytest.mark.parametrize("count", [1, 4096, 5000])
@pytest.mark.parametrize("rank,size,phases", [(0, 2, 0), (1, 2, 3), (2, 4, 1)])
def test_one_shot(rank, size, phases, count):
    parts = parts_of(size, count)
    parts[rank][0] = -0.0  # is sent as a zero, for a negative zero means that nothing has arrived
    fakes = Fakes(rank, size, phases)
    padded = [torch.nn.functional.pad(part, (0, -count % 4096)).view(-1, 4096) for part in parts]
    fakes.arrived(padded, 1)
    for slot in range(len(padded[0])):  # beyond the values nothing comes
        for source in range(size):
            fakes.area(rank, slot, source)[max(0, count - slot * 4096):] = EMPTY_BITS
    x = parts[rank].clone()
    all_reduce(x, fakes.peers, max_polls=1)
    assert torch.equal(x, reference.all_reduce(parts))
    programs = len(padded[0])
    assert fakes.peers.phases[:programs].tolist() == [phases + 1] * programs
    assert fakes.peers.phases[programs:].tolist() == [phases] * (MIN_SLOTS - programs)
    assert fakes.is_empty, "the next turn but one would take these values for its own"
    for other in [other for other in range(size) if other != rank]:
        sent = torch.cat([fakes.area(other, slot, rank)[:4096] for slot in range(programs)])[:count]
        assert torch.equal(sent.view(torch.float16), parts[rank]) and not (sent == EMPTY_BITS).any()


def test_two_shots_sum_the_own_share_and_take_the_others_as_they_come():
    size, rank, count = 2, 1, 4096
    parts = parts_of(size, count)
    fakes = Fakes(rank, size)
    fakes.area(rank, 0, 0)[:2048] = parts[0][2048:].view(torch.int16)
    theirs = torch.full((2048,), 3.0).half()  # the other's share as it has summed it up
    fakes.area(rank, 0, 0)[2048:4096] = theirs.view(torch.int16)
    x = parts[rank].clone()
    all_reduce(x, fakes.peers, two_shots=True, max_polls=1)
    own = reference.all_reduce(parts)[2048:]
    assert torch.equal(x[2048:], own) and torch.equal(x[:2048], theirs)
    assert torch.equal(fakes.area(0, 0, rank)[:2048].view(torch.float16), parts[rank][:2048])
    assert torch.equal(fakes.area(0, 0, rank)[2048:4096].view(torch.float16), own)
    assert fakes.is_empty


@pytest.mark.parametrize("rows,width,rank,size", [(1, 64, 0, 2), (3, 96, 1, 2), (200, 48, 2, 4)])
def test_norm_of_a_sum(rows, width, rank, size):
    """With more rows than programs each takes two."""
    parts, residual = parts_of(size, rows, width), torch.randn(rows, width).half()
    weight = torch.rand(width).half()
    fakes = Fakes(rank, size)
    tile = rows_per_program(rows, width)
    assert tile == (2 if rows > MIN_SLOTS else 1)
    fakes.arrived(parts, tile)
    y, total = all_reduce_rmsnorm(parts[rank], residual, weight, 1e-5, fakes.peers, max_polls=1)
    wanted, wanted_total = reference.all_reduce_rmsnorm(parts, residual, weight, 1e-5)
    assert torch.equal(total, wanted_total) and torch.allclose(y, wanted, atol=2e-3, rtol=2e-3)
    assert fakes.is_empty


def test_norm_of_a_sum_in_two_shots():
    rows, width, rank, size = 3, 96, 0, 2  # shares of 64 columns, of which the last has 32
    parts, residual = parts_of(size, rows, width), torch.randn(rows, width).half()
    weight = torch.rand(width).half()
    fakes = Fakes(rank, size)
    whole = reference.all_reduce(parts)
    for slot in range(rows):
        fakes.area(rank, slot, 1)[:64] = parts[1][slot, :64].view(torch.int16)
        fakes.area(rank, slot, 1)[64:96] = whole[slot, 64:].view(torch.int16)
    y, total = all_reduce_rmsnorm(parts[rank], residual, weight, 1e-5, fakes.peers, two_shots=True, max_polls=1)
    wanted, wanted_total = reference.all_reduce_rmsnorm(parts, residual, weight, 1e-5)
    assert torch.equal(total, wanted_total) and torch.allclose(y, wanted, atol=2e-3, rtol=2e-3)
    assert fakes.is_empty


def arrived_blocks(fakes: Fakes, parts: list[torch.Tensor], each: int = 4096) -> None:
    """Every other rank has sent these values, ``each`` a program."""
    for source, part in enumerate(parts):
        for slot, block in enumerate(part.flatten().split(each) if source != fakes.peers.rank else ()):
            fakes.area(fakes.peers.rank, slot, source)[:len(block)] = block.view(torch.int16)


@pytest.mark.parametrize("rank,size,phases", [(1, 2, 0), (2, 4, 3)])
def test_a_rank_gathers_all_rows(rank, size, phases):
    parts = parts_of(size, 50, 100)
    fakes = Fakes(rank, size, phases)
    arrived_blocks(fakes, parts)
    assert torch.equal(all_gather(parts[rank], fakes.peers, max_polls=1), torch.cat(parts))
    sent = torch.cat([fakes.area(rank - 1, slot, rank)[:4096] for slot in range(2)])[:5000]
    assert torch.equal(sent.view(torch.float16).view(50, 100), parts[rank])
    assert fakes.is_empty and fakes.peers.phases[:3].tolist() == [phases + 1, phases + 1, phases]


@pytest.mark.parametrize("rank,size,phases", [(1, 2, 0), (2, 4, 3)])
def test_a_rank_sums_its_rows(rank, size, phases):
    parts = parts_of(size, 50 * size, 100)
    fakes = Fakes(rank, size, phases)
    arrived_blocks(fakes, [part[50 * rank:50 * rank + 50] for part in parts])
    assert torch.equal(reduce_scatter(parts[rank], fakes.peers, max_polls=1),
                       reference.all_reduce(parts)[50 * rank:50 * rank + 50])
    sent = torch.cat([fakes.area(0, slot, rank)[:4096] for slot in range(2)])[:5000]
    assert torch.equal(sent.view(torch.float16).view(50, 100), parts[rank][:50])
    assert fakes.is_empty and fakes.peers.phases[:3].tolist() == [phases + 1, phases + 1, phases]


def test_programs_take_more_where_slots_are_few():
    parts = parts_of(2, 150, 96)  # 14,400 values, for two slots
    fakes = Fakes(1, 2, slots=2)
    arrived_blocks(fakes, parts, SLOT_VALUES)
    assert torch.equal(all_gather(parts[1], fakes.peers, max_polls=1), torch.cat(parts))
    assert fakes.is_empty and fakes.peers.phases.tolist() == [1, 1]
    fakes = Fakes(1, 2, slots=2)
    arrived_blocks(fakes, parts, SLOT_VALUES)
    x = parts[1].clone()
    all_reduce(x, fakes.peers, max_polls=1)
    assert torch.equal(x, reference.all_reduce(parts)) and fakes.is_empty


def test_norms_of_many_rows_take_more_slots():
    rows, width = MIN_SLOTS + 4, 4096  # two rows a program, had they no more slots
    assert rows_per_program(rows, width) == 2 and rows_per_program(rows, width, rows) == 1
    parts, residual, weight = parts_of(2, rows, width), torch.randn(rows, width).half(), torch.rand(width).half()
    fakes = Fakes(0, 2, slots=rows)
    fakes.arrived(parts, 1)
    y, total = all_reduce_rmsnorm(parts[0], residual, weight, 1e-5, fakes.peers, max_polls=1)
    wanted, wanted_total = reference.all_reduce_rmsnorm(parts, residual, weight, 1e-5)
    assert torch.equal(total, wanted_total) and torch.allclose(y, wanted, atol=2e-3, rtol=2e-3)
    assert fakes.is_empty and fakes.peers.phases.tolist() == [1] * rows


def test_rows_of_a_program():
    """Small sums have few programs; larger ones have 4,096 values a program while there are enough slots."""
    assert [rows_per_program(rows, 2048, 2048) for rows in (1, 128, 256, 512, 4096, 8192)] == [1, 1, 2, 2, 2, 4]
    assert [rows_per_program(rows, 4096, 2048) for rows in (128, 256, 2048, 4096, 4097)] == [1, 1, 1, 2, None]


def test_rows_that_do_not_fit():
    assert rows_per_program(MIN_SLOTS, SLOT_VALUES) == 1
    assert rows_per_program(MIN_SLOTS + 1, SLOT_VALUES) is None and rows_per_program(1, SLOT_VALUES + 8) is None


def test_waiting_for_a_peer_that_never_comes_ends_in_a_trial():
    all_reduce(torch.ones(8).half(), Fakes(0, 2).peers, max_polls=3)
