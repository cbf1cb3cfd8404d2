"""One rank's part of a sum over peers, whose buffers and flags are as a peer would have left them; collected by
test_kernels_interpreted.py. What the ranks do together is tests/gpu/test_tensor_parallel.py's."""

from __future__ import annotations

import pytest
import torch

from baton.kernels import _triton
from baton.kernels.peer_sum import SLOT, SLOTS, Peers, peer_sum

pytestmark = pytest.mark.skipif(not _triton.INTERPRETED, reason="needs TRITON_INTERPRET=1")


def lone_rank(rank: int, size: int, theirs: list[torch.Tensor], turns: int = 0) -> Peers:
    """``theirs[r]`` stands in rank r's buffer, at the places of this turn; every peer has raised its flags here."""
    buffers = tuple(torch.full((SLOTS * 2 * SLOT,), float("nan"), dtype=theirs[0].dtype) for _ in range(size))
    for buffer, values in zip(buffers, theirs):
        for program, part in enumerate(values.split(4096)):
            begin = (2 * program + turns % 2) * SLOT
            buffer[begin:begin + len(part)] = part
    flags = tuple(torch.zeros(SLOTS, size, dtype=torch.int32) for _ in range(size))
    flags[rank].fill_(1)
    return Peers(rank, buffers, tuple(flag.view(-1) for flag in flags), torch.full((SLOTS,), turns, dtype=torch.int32))


@pytest.mark.parametrize("count", [1, 4096, 5000])
@pytest.mark.parametrize("rank,size,turns", [(0, 2, 0), (1, 2, 3), (2, 4, 1)])
def test_one_shot(rank, size, turns, count):
    parts = [torch.randn(count, generator=torch.Generator().manual_seed(r)).half() for r in range(size)]
    peers = lone_rank(rank, size, parts, turns)
    peers.buffers[rank].fill_(float("nan"))
    x = parts[rank].clone()
    peer_sum(x, peers, patience=1)
    assert torch.equal(x, torch.stack(parts).float().sum(0).half())
    programs = -(-count // 4096)
    assert peers.turns[:programs].tolist() == [turns + 1] * programs
    assert peers.turns[programs:].tolist() == [turns] * (SLOTS - programs)
    for other in range(size):
        raised = peers.flags[other].view(SLOTS, size)
        if other == rank:  # taken down, all but its own, which nobody raises
            assert raised[:programs, [r for r in range(size) if r != rank]].sum() == 0
        else:
            assert raised[:programs, rank].tolist() == [1] * programs and raised.sum() == programs


def test_two_shots_sum_the_own_share_and_take_the_others_from_their_buffers():
    """The peer's share stands summed in its buffer already, and what it adds to ours: both at once, for one pass."""
    size, rank, count = 2, 1, 4096
    parts = [torch.randn(count, generator=torch.Generator().manual_seed(r)).half() for r in range(size)]
    peers = lone_rank(rank, size, parts)
    x = parts[rank].clone()
    peer_sum(x, peers, two_shot=True, patience=1)
    assert torch.equal(x[2048:], (parts[0].float() + parts[1].float()).half()[2048:])
    assert torch.equal(x[:2048], parts[0][:2048]), "a rank's share is taken as its buffer has it"
    assert torch.equal(peers.buffers[rank][2048:4096], x[2048:]), "the peer would not find this rank's share"


def test_waiting_for_a_peer_that_never_comes_ends_in_a_trial():
    parts = [torch.ones(8).half()] * 2
    peers = lone_rank(0, 2, parts)
    for flag in peers.flags:
        flag.zero_()
    peer_sum(parts[0].clone(), peers, patience=3)
