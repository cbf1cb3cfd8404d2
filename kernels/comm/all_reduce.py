"""Sums over a few GPUs of one host, written straight into each other's memory over NVLink; norms of such sums; and the
two halves of a sum in two shots for themselves, a reduce-scatter and an all-gather.

A decode step's messages are so small that NCCL's protocol is most of their time. In one shot every rank writes its part
to all others. In two shots it gets from them its share alone, and writes the sum of that to them: fewer bytes, one way
more. (Both forms are those of TensorRT-LLM's and vLLM's custom all-reduce.) Ranks are added in their order, so that all
get the same bits.

There are no flags: what has not arrived is a negative zero, which nobody sends, and who has read a value puts the
negative zero back. So a value crosses the link once and no fence is waited for (as in NCCL's and TensorRT-LLM's
low-latency protocols).

Program p of every rank works in slot p of the buffers, which has two places that take turns. A rank that sends in one
call has emptied its place of the call before, so nobody writes where something is yet to be read. Whose turn it is
stands in device memory: CUDA graphs replay in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._triton import tl, triton

SLOTS = 128
SLOT = 8192
"""Programs that buffers have slots for at least, and values that each takes at most."""
_BLOCK = 4096
"""Values that a program takes where the slots are enough for that."""
EMPTY = -32768
"""The bits of a negative zero, in bfloat16 and in float16."""
FOREVER = 2**31 - 1


@triton.jit
def _sendable(x, NOTHING: tl.constexpr):
    bits = x.to(tl.int16, bitcast=True)
    return tl.where(bits == NOTHING, 0, bits).to(tl.int16)


@triton.jit
def _take(pointers, inside, patience, NOTHING: tl.constexpr):
    """The bits that arrive at ``pointers``, which are empty again. After ``patience`` looks they are given up."""
    bits = tl.load(pointers, inside, other=0, volatile=True)
    looks = 0
    while (tl.max((bits == NOTHING).to(tl.int32)) > 0) & (looks < patience):
        bits = tl.load(pointers, inside, other=0, volatile=True)
        looks += 1
    tl.store(pointers, tl.full(bits.shape, NOTHING, tl.int16), inside)
    return bits


@triton.jit
def _one_shot(x_ptr, buffers, place, first, width, count, patience, RANK: tl.constexpr, WORLD: tl.constexpr,
              SLOT_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NOTHING: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    index = (first + row) * width + column
    inside = (column < width) & (index < count)
    spot = row * BLOCK + column
    x = tl.load(x_ptr + index, inside, other=0.0)
    bits = _sendable(x, NOTHING)
    for step in tl.static_range(1, WORLD):
        tl.store(buffers[(RANK + step) % WORLD] + place + RANK * SLOT_SIZE + spot, bits, inside)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            taken = _take(buffers[RANK] + place + rank * SLOT_SIZE + spot, inside, patience, NOTHING)
            total += taken.to(x.dtype, bitcast=True).to(tl.float32)
    return total.to(x.dtype)


@triton.jit
def _two_shots(x_ptr, buffers, place, first, width, count, patience, RANK: tl.constexpr, WORLD: tl.constexpr,
               SLOT_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NOTHING: tl.constexpr):
    SHARE: tl.constexpr = BLOCK // WORLD  # columns of a rank
    row, part = tl.arange(0, ROWS)[:, None], tl.arange(0, SHARE)[None, :]
    spot = row * SHARE + part
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            theirs = (first + row) * width + rank * SHARE + part
            there = (rank * SHARE + part < width) & (theirs < count)
            tl.store(buffers[rank] + place + RANK * SLOT_SIZE + spot,
                     _sendable(tl.load(x_ptr + theirs, there, other=0.0), NOTHING), there)
    mine = (first + row) * width + RANK * SHARE + part
    within = (RANK * SHARE + part < width) & (mine < count)
    x = tl.load(x_ptr + mine, within, other=0.0)
    total = tl.zeros((ROWS, SHARE), tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            taken = _take(buffers[RANK] + place + rank * SLOT_SIZE + spot, within, patience, NOTHING)
            total += taken.to(x.dtype, bitcast=True).to(tl.float32)
    bits = _sendable(total.to(x.dtype), NOTHING)
    second = place + ROWS * SHARE  # behind what came in the first shot
    for rank in tl.static_range(WORLD):
        tl.store(buffers[rank] + second + RANK * SLOT_SIZE + spot, bits, within)
    column = tl.arange(0, BLOCK)[None, :]
    index = (first + row) * width + column
    whole = _take(buffers[RANK] + second + (column // SHARE) * SLOT_SIZE + row * SHARE + column % SHARE,
                  (column < width) & (index < count), patience, NOTHING)
    return whole.to(x.dtype, bitcast=True)


@triton.jit(do_not_specialize=["patience"])
def _peer_sum_kernel(x_ptr, buffers, turns_ptr, count, patience, RANK: tl.constexpr, WORLD: tl.constexpr,
                     TWO_SHOTS: tl.constexpr, SLOT_SIZE: tl.constexpr, BLOCK: tl.constexpr, NOTHING: tl.constexpr):
    slot = tl.program_id(0)
    turn = tl.load(turns_ptr + slot)
    place = (slot * 2 + turn % 2) * WORLD * SLOT_SIZE
    if TWO_SHOTS:
        total = _two_shots(x_ptr, buffers, place, slot, BLOCK, count, patience, RANK, WORLD, SLOT_SIZE, 1, BLOCK,
                           NOTHING)
    else:
        total = _one_shot(x_ptr, buffers, place, slot, BLOCK, count, patience, RANK, WORLD, SLOT_SIZE, 1, BLOCK,
                          NOTHING)
    index = slot * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.debug_barrier()  # all have read the turn
    tl.store(x_ptr + index, total, index < count)
    tl.store(turns_ptr + slot, turn + 1)


@triton.jit(do_not_specialize=["patience"])
def _peer_sum_norm_kernel(x_ptr, residual_ptr, weight_ptr, sum_ptr, y_ptr, buffers, turns_ptr, width, count, eps,
                          patience, RANK: tl.constexpr, WORLD: tl.constexpr, TWO_SHOTS: tl.constexpr,
                          SLOT_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NOTHING: tl.constexpr):
    slot = tl.program_id(0)
    first = slot * ROWS
    column = tl.arange(0, BLOCK)[None, :]
    index = (first + tl.arange(0, ROWS)[:, None]) * width + column
    inside = (column < width) & (index < count)
    # Asked for before the wait, in which they come.
    residual = tl.load(residual_ptr + index, inside, other=0.0)
    weight = tl.load(weight_ptr + column, column < width, other=0.0)
    turn = tl.load(turns_ptr + slot)
    place = (slot * 2 + turn % 2) * WORLD * SLOT_SIZE
    if TWO_SHOTS:
        total = _two_shots(x_ptr, buffers, place, first, width, count, patience, RANK, WORLD, SLOT_SIZE, ROWS, BLOCK,
                           NOTHING)
    else:
        total = _one_shot(x_ptr, buffers, place, first, width, count, patience, RANK, WORLD, SLOT_SIZE, ROWS, BLOCK,
                          NOTHING)
    total += residual
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    y = (wide * scale[:, None]).to(total.dtype) * weight  # rounded first, as in rmsnorm
    tl.debug_barrier()  # all have read the turn
    tl.store(sum_ptr + index, total, inside)
    tl.store(y_ptr + index, y, inside)
    tl.store(turns_ptr + slot, turn + 1)


@triton.jit(do_not_specialize=["patience"])
def _peer_scatter_kernel(x_ptr, y_ptr, buffers, turns_ptr, count, patience, RANK: tl.constexpr, WORLD: tl.constexpr,
                         SLOT_SIZE: tl.constexpr, BLOCK: tl.constexpr, NOTHING: tl.constexpr):
    slot = tl.program_id(0)
    turn = tl.load(turns_ptr + slot)
    place = (slot * 2 + turn % 2) * WORLD * SLOT_SIZE
    column = tl.arange(0, BLOCK)
    index = slot * BLOCK + column
    inside = index < count
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            x = tl.load(x_ptr + rank * count + index, inside, other=0.0)
            tl.store(buffers[rank] + place + RANK * SLOT_SIZE + column, _sendable(x, NOTHING), inside)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += tl.load(x_ptr + rank * count + index, inside, other=0.0).to(tl.float32)
        else:
            taken = _take(buffers[RANK] + place + rank * SLOT_SIZE + column, inside, patience, NOTHING)
            total += taken.to(y_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    tl.debug_barrier()  # all have read the turn
    tl.store(y_ptr + index, total.to(y_ptr.dtype.element_ty), inside)
    tl.store(turns_ptr + slot, turn + 1)


@triton.jit(do_not_specialize=["patience"])
def _peer_gather_kernel(x_ptr, y_ptr, buffers, turns_ptr, count, patience, RANK: tl.constexpr, WORLD: tl.constexpr,
                        SLOT_SIZE: tl.constexpr, BLOCK: tl.constexpr, NOTHING: tl.constexpr):
    slot = tl.program_id(0)
    turn = tl.load(turns_ptr + slot)
    place = (slot * 2 + turn % 2) * WORLD * SLOT_SIZE
    column = tl.arange(0, BLOCK)
    index = slot * BLOCK + column
    inside = index < count
    own = _sendable(tl.load(x_ptr + index, inside, other=0.0), NOTHING)
    for step in tl.static_range(1, WORLD):
        tl.store(buffers[(RANK + step) % WORLD] + place + RANK * SLOT_SIZE + column, own, inside)
    for rank in tl.static_range(WORLD):
        bits = own
        if rank != RANK:
            bits = _take(buffers[RANK] + place + rank * SLOT_SIZE + column, inside, patience, NOTHING)
        tl.store(y_ptr + rank * count + index, bits.to(y_ptr.dtype.element_ty, bitcast=True), inside)
    tl.debug_barrier()  # all have read the turn
    tl.store(turns_ptr + slot, turn + 1)


@dataclass(frozen=True)
class Peers:
    """What the ranks share: of each, in rank order, a buffer ``[slots * 2 * ranks * SLOT]`` int16 in memory that all
    see, at first all ``EMPTY``; ``turns`` [slots] int32, at first zeros, is this rank's. They are ``SLOTS`` or more."""

    rank: int
    buffers: tuple[torch.Tensor, ...]
    turns: torch.Tensor

    @property
    def size(self) -> int:
        return len(self.buffers)

    @property
    def slots(self) -> int:
        return len(self.turns)


def buffer_values(ranks: int, slots: int = SLOTS) -> int:
    """The length of each rank's buffer."""
    return slots * 2 * ranks * SLOT


def peer_sum(x: torch.Tensor, peers: Peers, *, two_shots: bool = False, patience: int = FOREVER) -> None:
    """Sum ``x``, contiguous, in bfloat16 or float16 and of equal size on every rank, over the ranks; in place.

    It has ``SLOT`` values for each slot at most. All ranks make the same calls in one order, on one stream each. With
    ``two_shots`` the ranks are a power of two.
    """
    count = x.numel()
    block = _block(count, peers)
    _peer_sum_kernel[(-(-count // block),)](
        x, peers.buffers, peers.turns, count, patience, RANK=peers.rank, WORLD=peers.size, TWO_SHOTS=two_shots,
        SLOT_SIZE=SLOT, BLOCK=block, NOTHING=EMPTY, num_warps=16)


def _block(count: int, peers: Peers) -> int:
    """Values of a program, of so many in all."""
    assert 0 < count <= peers.slots * SLOT
    return _BLOCK if count <= peers.slots * _BLOCK else SLOT


def rows_a_program(rows: int, width: int, slots: int = SLOTS) -> int | None:
    """How many rows each program of ``peer_sum_norm`` takes, which have so many ``slots``; None where so many rows do
    not fit."""
    block = triton.next_power_of_2(width)
    most, wanted = SLOT // block, triton.next_power_of_2(-(-rows // SLOTS))
    if wanted * block > _BLOCK:
        wanted = max(triton.next_power_of_2(-(-rows // slots)), _BLOCK // block)
    return wanted if 0 < wanted <= most else None


def peer_sum_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, peers: Peers, *,
                  two_shots: bool = False, patience: int = FOREVER,
                  each: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``(norm(sum + residual) * weight, sum + residual)`` of the sum of ``x`` over the ranks; see ``peer_sum``.

    ``x`` and ``residual`` are ``[T, width]``, contiguous, as many rows as ``rows_a_program`` has an answer for;
    ``residual`` and ``weight`` [width] are equal on all ranks. ``each``: rows of a program, in place of that answer.
    """
    rows, width = x.shape
    each = each or rows_a_program(rows, width, peers.slots)
    assert each is not None and 0 < -(-rows // each) <= peers.slots
    assert x.is_contiguous() and residual.is_contiguous() and x.dtype.itemsize == 2
    block = triton.next_power_of_2(width)
    y, total = torch.empty_like(x), torch.empty_like(x)
    _peer_sum_norm_kernel[(-(-rows // each),)](
        x, residual, weight, total, y, peers.buffers, peers.turns, width, x.numel(), eps, patience, RANK=peers.rank,
        WORLD=peers.size, TWO_SHOTS=two_shots, SLOT_SIZE=SLOT, ROWS=each, BLOCK=block, NOTHING=EMPTY,
        num_warps=max(1, min(16, each * block // 256)))
    return y, total


def peer_scatter(x: torch.Tensor, peers: Peers, *, patience: int = FOREVER) -> torch.Tensor:
    """``[ranks * n, a]`` of each rank, summed over the ranks; this rank's ``[n, a]`` of that. See ``peer_sum``."""
    y = x.new_empty(x.shape[0] // peers.size, *x.shape[1:])
    assert x.is_contiguous() and y.numel() * peers.size == x.numel()
    _over_blocks(_peer_scatter_kernel, x, y, y.numel(), peers, patience)
    return y


def peer_gather(x: torch.Tensor, peers: Peers, *, patience: int = FOREVER) -> torch.Tensor:
    """``[n, a]`` of each rank to ``[ranks * n, a]``, in their order; zeros lose their sign. See ``peer_sum``."""
    y = x.new_empty(x.shape[0] * peers.size, *x.shape[1:])
    assert x.is_contiguous()
    _over_blocks(_peer_gather_kernel, x, y, x.numel(), peers, patience)
    return y


def _over_blocks(kernel: Any, x: torch.Tensor, y: torch.Tensor, count: int, peers: Peers, patience: int) -> None:
    """``count`` values of each rank."""
    block = _block(count, peers)
    assert x.dtype.itemsize == 2
    kernel[(-(-count // block),)](x, y, peers.buffers, peers.turns, count, patience, RANK=peers.rank, WORLD=peers.size,
                                  SLOT_SIZE=SLOT, BLOCK=block, NOTHING=EMPTY, num_warps=16)
