"""Sums over a few GPUs of one host, read straight from each other's memory over NVLink.

A decode step's messages are so small that NCCL's protocol is most of their time. In one shot every rank writes its part
into a buffer that its peers see, and reads all of theirs. In two shots a rank sums only its share of each program's
part and then reads the other shares, summed: fewer bytes, one meeting more. (The two forms are those of TensorRT-LLM's
and vLLM's custom all-reduce.) Ranks are added in their order, so that all get the same bits.

Program p of every rank works in slot p of the buffers, which has two places that take turns. A rank that meets its
peers in one call has finished the call before, everywhere, so a place is written again when nobody reads it any more.
Whose turn it is stands in device memory: CUDA graphs replay in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._triton import tl, triton

SLOTS = 128
SLOT = 8192
"""Programs at most, and values that each takes at most."""
_BLOCK = 4096
FOREVER = 2**31 - 1


@triton.jit
def _meet(flags, slot, RANK: tl.constexpr, WORLD: tl.constexpr, PATIENCE: tl.constexpr):
    """Wait until this program has come here on every rank; what they wrote before is seen after.

    A flag is raised on the peer and taken down by it. After ``PATIENCE`` looks the wait is given up, for a trial.
    """
    tl.debug_barrier()
    for step in tl.static_range(1, WORLD):
        raised = flags[(RANK + step) % WORLD] + slot * WORLD + RANK
        looks = 0
        while (tl.atomic_cas(raised, 0, 1, sem="release", scope="sys") != 0) & (looks < PATIENCE):
            looks += 1
    for step in tl.static_range(1, WORLD):
        awaited = flags[RANK] + slot * WORLD + (RANK + step) % WORLD
        looks = 0
        while (tl.atomic_cas(awaited, 1, 0, sem="acquire", scope="sys") != 1) & (looks < PATIENCE):
            looks += 1
    tl.debug_barrier()


@triton.jit
def _one_shot_kernel(x_ptr, buffers, flags, turns_ptr, count, RANK: tl.constexpr, WORLD: tl.constexpr,
                     SLOT_SIZE: tl.constexpr, BLOCK: tl.constexpr, PATIENCE: tl.constexpr):
    slot = tl.program_id(0)
    turn = tl.load(turns_ptr + slot)
    column = tl.arange(0, BLOCK)
    inside = slot * BLOCK + column < count
    place = (slot * 2 + turn % 2) * SLOT_SIZE + column
    x = tl.load(x_ptr + slot * BLOCK + column, inside, other=0.0)
    tl.store(buffers[RANK] + place, x, inside)
    _meet(flags, slot, RANK, WORLD, PATIENCE)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        total += tl.load(buffers[rank] + place, inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + slot * BLOCK + column, total.to(x.dtype), inside)
    tl.store(turns_ptr + slot, turn + 1)


@triton.jit
def _two_shot_kernel(x_ptr, buffers, flags, turns_ptr, count, RANK: tl.constexpr, WORLD: tl.constexpr,
                     SLOT_SIZE: tl.constexpr, BLOCK: tl.constexpr, PATIENCE: tl.constexpr):
    slot = tl.program_id(0)
    turn = tl.load(turns_ptr + slot)
    SHARE: tl.constexpr = BLOCK // WORLD
    column = tl.arange(0, BLOCK)
    inside = slot * BLOCK + column < count
    begin = (slot * 2 + turn % 2) * SLOT_SIZE
    x = tl.load(x_ptr + slot * BLOCK + column, inside, other=0.0)
    tl.store(buffers[RANK] + begin + column, x, inside)
    _meet(flags, slot, RANK, WORLD, PATIENCE)
    part = tl.arange(0, SHARE)
    mine = RANK * SHARE + part
    within = slot * BLOCK + mine < count
    total = tl.zeros((SHARE,), tl.float32)
    for rank in tl.static_range(WORLD):
        total += tl.load(buffers[rank] + begin + mine, within, other=0.0).to(tl.float32)
    tl.store(buffers[RANK] + begin + mine, total.to(x.dtype), within)  # nobody else reads this share of this buffer
    _meet(flags, slot, RANK, WORLD, PATIENCE)
    for rank in tl.static_range(WORLD):
        theirs = rank * SHARE + part
        there = slot * BLOCK + theirs < count
        summed = tl.load(buffers[rank] + begin + theirs, there, other=0.0)
        tl.store(x_ptr + slot * BLOCK + theirs, summed, there)
    tl.store(turns_ptr + slot, turn + 1)


@dataclass(frozen=True)
class Peers:
    """What the ranks share: of each, in rank order, a buffer ``[SLOTS * 2 * SLOT]`` of one type and flags
    ``[SLOTS * ranks]`` int32, zeros at first, both in memory that all see; ``turns`` [SLOTS] int32 is this rank's."""

    rank: int
    buffers: tuple[torch.Tensor, ...]
    flags: tuple[torch.Tensor, ...]
    turns: torch.Tensor

    @property
    def size(self) -> int:
        return len(self.buffers)


def peer_sum(x: torch.Tensor, peers: Peers, *, two_shot: bool = False, patience: int = FOREVER) -> None:
    """Sum ``x``, contiguous, of the buffers' type and of equal size on every rank, over the ranks; in place.

    It has ``SLOTS * 4096`` values at most. All ranks make the same calls in one order, on one stream each.
    """
    count = x.numel()
    programs = triton.cdiv(count, _BLOCK)
    assert 0 < programs <= SLOTS and x.is_contiguous() and x.dtype == peers.buffers[0].dtype
    kernel = _two_shot_kernel if two_shot else _one_shot_kernel
    kernel[(programs,)](x, peers.buffers, peers.flags, peers.turns, count, RANK=peers.rank, WORLD=peers.size,
                        SLOT_SIZE=SLOT, BLOCK=_BLOCK, PATIENCE=patience, num_warps=16)
