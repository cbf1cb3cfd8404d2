"""All-reduce, reduce-scatter and all-gather over a few GPUs of one host through symmetric memory, written straight into
each other's buffers over NVLink; also fused with a norm.

A decode step's messages are so small that NCCL's protocol is most of their time. In one shot every rank writes its part
to all others. In two shots it gets from them only its share, and writes the sum of that to them: fewer bytes, one
transfer more. (Both forms are those of TensorRT-LLM's and vLLM's custom all-reduce.) Ranks are added in their order, so
that all get the same bits.

There are no flags: a value that has not arrived is a negative zero, which no rank sends, and the reader of a value puts
the negative zero back. So a value crosses the link once and no fence is waited for (as in NCCL's and TensorRT-LLM's
low-latency protocols).

Program p of every rank works in slot p of the buffers, which is double-buffered. A rank that sends in one call has
emptied its buffer of the last call, so nothing is overwritten that is yet to be read. The current phase is in device
memory: CUDA graphs replay in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .._triton import tl, triton

MIN_SLOTS = 128
SLOT_VALUES = 8192
"""The minimum of slots, one a program, that buffers have, and the values of a slot."""
_BLOCK = 4096
"""Values of a program where there are enough slots for that."""
EMPTY_BITS = -32768
"""The bits of a negative zero, in bfloat16 and in float16."""
POLL_FOREVER = 2**31 - 1


@triton.jit
def _to_sendable_bits(x, EMPTY_BITS: tl.constexpr):
    bits = x.to(tl.int16, bitcast=True)
    return tl.where(bits == EMPTY_BITS, 0, bits).to(tl.int16)


@triton.jit
def _receive(pointers, inside, max_polls, EMPTY_BITS: tl.constexpr):
    """Waits for the bits at ``pointers``, returns them and empties the buffer. Gives up after ``max_polls`` polls."""
    bits = tl.load(pointers, inside, other=0, volatile=True)
    polls = 0
    while (tl.max((bits == EMPTY_BITS).to(tl.int32)) > 0) & (polls < max_polls):
        bits = tl.load(pointers, inside, other=0, volatile=True)
        polls += 1
    tl.store(pointers, tl.full(bits.shape, EMPTY_BITS, tl.int16), inside)
    return bits


@triton.jit
def _one_shot(x_ptr, buffers, base, first, width, count, max_polls, RANK: tl.constexpr, WORLD: tl.constexpr,
              SLOT_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EMPTY_BITS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    index = (first + row) * width + column
    inside = (column < width) & (index < count)
    offset = row * BLOCK + column
    x = tl.load(x_ptr + index, inside, other=0.0)
    bits = _to_sendable_bits(x, EMPTY_BITS)
    for step in tl.static_range(1, WORLD):
        tl.store(buffers[(RANK + step) % WORLD] + base + RANK * SLOT_SIZE + offset, bits, inside)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            taken = _receive(buffers[RANK] + base + rank * SLOT_SIZE + offset, inside, max_polls, EMPTY_BITS)
            total += taken.to(x.dtype, bitcast=True).to(tl.float32)
    return total.to(x.dtype)


@triton.jit
def _two_shots(x_ptr, buffers, base, first, width, count, max_polls, RANK: tl.constexpr, WORLD: tl.constexpr,
               SLOT_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EMPTY_BITS: tl.constexpr):
    SHARE: tl.constexpr = BLOCK // WORLD  # columns of a rank
    row, part = tl.arange(0, ROWS)[:, None], tl.arange(0, SHARE)[None, :]
    offset = row * SHARE + part
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            theirs = (first + row) * width + rank * SHARE + part
            there = (rank * SHARE + part < width) & (theirs < count)
            tl.store(buffers[rank] + base + RANK * SLOT_SIZE + offset,
                     _to_sendable_bits(tl.load(x_ptr + theirs, there, other=0.0), EMPTY_BITS), there)
    mine = (first + row) * width + RANK * SHARE + part
    within = (RANK * SHARE + part < width) & (mine < count)
    x = tl.load(x_ptr + mine, within, other=0.0)
    total = tl.zeros((ROWS, SHARE), tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += x.to(tl.float32)
        else:
            taken = _receive(buffers[RANK] + base + rank * SLOT_SIZE + offset, within, max_polls, EMPTY_BITS)
            total += taken.to(x.dtype, bitcast=True).to(tl.float32)
    bits = _to_sendable_bits(total.to(x.dtype), EMPTY_BITS)
    second = base + ROWS * SHARE  # after what came in the first shot
    for rank in tl.static_range(WORLD):
        tl.store(buffers[rank] + second + RANK * SLOT_SIZE + offset, bits, within)
    column = tl.arange(0, BLOCK)[None, :]
    index = (first + row) * width + column
    whole = _receive(buffers[RANK] + second + (column // SHARE) * SLOT_SIZE + row * SHARE + column % SHARE,
                  (column < width) & (index < count), max_polls, EMPTY_BITS)
    return whole.to(x.dtype, bitcast=True)


@triton.jit(do_not_specialize=["max_polls"])
def _all_reduce_kernel(x_ptr, buffers, phases_ptr, count, max_polls, RANK: tl.constexpr, WORLD: tl.constexpr,
                       TWO_SHOTS: tl.constexpr, SLOT_SIZE: tl.constexpr, BLOCK: tl.constexpr, EMPTY_BITS: tl.constexpr):
    slot = tl.program_id(0)
    phase = tl.load(phases_ptr + slot)
    base = (slot * 2 + phase % 2) * WORLD * SLOT_SIZE
    if TWO_SHOTS:
        total = _two_shots(x_ptr, buffers, base, slot, BLOCK, count, max_polls, RANK, WORLD, SLOT_SIZE, 1, BLOCK,
                           EMPTY_BITS)
    else:
        total = _one_shot(x_ptr, buffers, base, slot, BLOCK, count, max_polls, RANK, WORLD, SLOT_SIZE, 1, BLOCK,
                          EMPTY_BITS)
    index = slot * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.debug_barrier()  # all have read the phase
    tl.store(x_ptr + index, total, index < count)
    tl.store(phases_ptr + slot, phase + 1)


@triton.jit(do_not_specialize=["max_polls"])
def _all_reduce_rmsnorm_kernel(x_ptr, residual_ptr, weight_ptr, sum_ptr, y_ptr, buffers, phases_ptr, width, count, eps,
                               max_polls, RANK: tl.constexpr, WORLD: tl.constexpr, TWO_SHOTS: tl.constexpr,
                               SLOT_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
                               EMPTY_BITS: tl.constexpr):
    slot = tl.program_id(0)
    first = slot * ROWS
    column = tl.arange(0, BLOCK)[None, :]
    index = (first + tl.arange(0, ROWS)[:, None]) * width + column
    inside = (column < width) & (index < count)
    # Loaded before the wait, which hides their latency.
    residual = tl.load(residual_ptr + index, inside, other=0.0)
    weight = tl.load(weight_ptr + column, column < width, other=0.0)
    phase = tl.load(phases_ptr + slot)
    base = (slot * 2 + phase % 2) * WORLD * SLOT_SIZE
    if TWO_SHOTS:
        total = _two_shots(x_ptr, buffers, base, first, width, count, max_polls, RANK, WORLD, SLOT_SIZE, ROWS, BLOCK,
                           EMPTY_BITS)
    else:
        total = _one_shot(x_ptr, buffers, base, first, width, count, max_polls, RANK, WORLD, SLOT_SIZE, ROWS, BLOCK,
                          EMPTY_BITS)
    total += residual
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)
    y = (wide * scale[:, None]).to(weight.dtype) * weight  # rounded first, as in rmsnorm
    tl.debug_barrier()  # all have read the phase
    tl.store(sum_ptr + index, total, inside)
    tl.store(y_ptr + index, y, inside)
    tl.store(phases_ptr + slot, phase + 1)


@triton.jit(do_not_specialize=["max_polls"])
def _reduce_scatter_kernel(x_ptr, y_ptr, buffers, phases_ptr, count, max_polls, RANK: tl.constexpr, WORLD: tl.constexpr,
                           SLOT_SIZE: tl.constexpr, BLOCK: tl.constexpr, EMPTY_BITS: tl.constexpr):
    slot = tl.program_id(0)
    phase = tl.load(phases_ptr + slot)
    base = (slot * 2 + phase % 2) * WORLD * SLOT_SIZE
    column = tl.arange(0, BLOCK)
    index = slot * BLOCK + column
    inside = index < count
    for rank in tl.static_range(WORLD):
        if rank != RANK:
            x = tl.load(x_ptr + rank * count + index, inside, other=0.0)
            tl.store(buffers[rank] + base + RANK * SLOT_SIZE + column, _to_sendable_bits(x, EMPTY_BITS), inside)
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            total += tl.load(x_ptr + rank * count + index, inside, other=0.0).to(tl.float32)
        else:
            taken = _receive(buffers[RANK] + base + rank * SLOT_SIZE + column, inside, max_polls, EMPTY_BITS)
            total += taken.to(y_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
    tl.debug_barrier()  # all have read the phase
    tl.store(y_ptr + index, total.to(y_ptr.dtype.element_ty), inside)
    tl.store(phases_ptr + slot, phase + 1)


@triton.jit(do_not_specialize=["max_polls"])
def _all_gather_kernel(x_ptr, y_ptr, buffers, phases_ptr, count, max_polls, RANK: tl.constexpr, WORLD: tl.constexpr,
                       SLOT_SIZE: tl.constexpr, BLOCK: tl.constexpr, EMPTY_BITS: tl.constexpr):
    slot = tl.program_id(0)
    phase = tl.load(phases_ptr + slot)
    base = (slot * 2 + phase % 2) * WORLD * SLOT_SIZE
    column = tl.arange(0, BLOCK)
    index = slot * BLOCK + column
    inside = index < count
    own = _to_sendable_bits(tl.load(x_ptr + index, inside, other=0.0), EMPTY_BITS)
    for step in tl.static_range(1, WORLD):
        tl.store(buffers[(RANK + step) % WORLD] + base + RANK * SLOT_SIZE + column, own, inside)
    for rank in tl.static_range(WORLD):
        bits = own
        if rank != RANK:
            bits = _receive(buffers[RANK] + base + rank * SLOT_SIZE + column, inside, max_polls, EMPTY_BITS)
        tl.store(y_ptr + rank * count + index, bits.to(y_ptr.dtype.element_ty, bitcast=True), inside)
    tl.debug_barrier()  # all have read the phase
    tl.store(phases_ptr + slot, phase + 1)


@dataclass(frozen=True)
class PeerBuffers:
    """The ranks' symmetric memory: of each, in rank order, a buffer ``[slots * 2 * ranks * SLOT_VALUES]`` int16 that
    all can write, initially all ``EMPTY_BITS``; ``phases`` [slots] int32, initially zeros, are this rank's. There are
    ``MIN_SLOTS`` or more slots."""

    rank: int
    buffers: tuple[torch.Tensor, ...]
    phases: torch.Tensor

    @property
    def size(self) -> int:
        return len(self.buffers)

    @property
    def slots(self) -> int:
        return len(self.phases)


def buffer_values(ranks: int, slots: int = MIN_SLOTS) -> int:
    """The length of each rank's buffer."""
    return slots * 2 * ranks * SLOT_VALUES


def all_reduce(x: torch.Tensor, peers: PeerBuffers, *, two_shots: bool = False, max_polls: int = POLL_FOREVER) -> None:
    """Sum ``x``, contiguous, in bfloat16 or float16 and of equal size on every rank, over the ranks; in place.

    It has at most ``SLOT_VALUES`` values for each slot. All ranks make the same calls in one order, on one stream each.
    With ``two_shots`` the number of ranks is a power of two.
    """
    count = x.numel()
    block = _block(count, peers)
    _all_reduce_kernel[(-(-count // block),)](
        x, peers.buffers, peers.phases, count, max_polls, RANK=peers.rank, WORLD=peers.size, TWO_SHOTS=two_shots,
        SLOT_SIZE=SLOT_VALUES, BLOCK=block, EMPTY_BITS=EMPTY_BITS, num_warps=16)


def _block(count: int, peers: PeerBuffers) -> int:
    """Values of a program, of ``count`` in all."""
    assert 0 < count <= peers.slots * SLOT_VALUES
    return _BLOCK if count <= peers.slots * _BLOCK else SLOT_VALUES


def rows_per_program(rows: int, width: int, slots: int = MIN_SLOTS) -> int | None:
    """Rows of each program of ``all_reduce_rmsnorm``, of which there are at most ``slots``; None where the rows do not
    fit."""
    block = triton.next_power_of_2(width)
    most, rows_each = SLOT_VALUES // block, triton.next_power_of_2(-(-rows // MIN_SLOTS))
    if rows_each * block > _BLOCK:
        rows_each = max(triton.next_power_of_2(-(-rows // slots)), _BLOCK // block)
    return rows_each if 0 < rows_each <= most else None


def all_reduce_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, peers: PeerBuffers, *,
                       two_shots: bool = False, max_polls: int = POLL_FOREVER,
                       each: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """``(norm(sum + residual) * weight, sum + residual)`` of the sum of ``x`` over the ranks; see ``all_reduce``.

    ``x`` and ``residual`` are ``[T, width]``, contiguous, of a number of rows for which ``rows_per_program`` is not
    None; ``residual`` and ``weight`` [width] are equal on all ranks. ``each`` replaces the rows of a program.
    """
    rows, width = x.shape
    each = each or rows_per_program(rows, width, peers.slots)
    assert each is not None and 0 < -(-rows // each) <= peers.slots
    assert x.is_contiguous() and residual.is_contiguous() and x.dtype.itemsize == 2
    block = triton.next_power_of_2(width)
    y, total = torch.empty_like(x), torch.empty_like(x)
    _all_reduce_rmsnorm_kernel[(-(-rows // each),)](
        x, residual, weight, total, y, peers.buffers, peers.phases, width, x.numel(), eps, max_polls, RANK=peers.rank,
        WORLD=peers.size, TWO_SHOTS=two_shots, SLOT_SIZE=SLOT_VALUES, ROWS=each, BLOCK=block, EMPTY_BITS=EMPTY_BITS,
        num_warps=max(1, min(16, each * block // 256)))
    return y, total


def reduce_scatter(x: torch.Tensor, peers: PeerBuffers, *, max_polls: int = POLL_FOREVER) -> torch.Tensor:
    """Sums ``[ranks * n, a]`` over the ranks and returns this rank's ``[n, a]``. See ``all_reduce``."""
    y = x.new_empty(x.shape[0] // peers.size, *x.shape[1:])
    assert x.is_contiguous() and y.numel() * peers.size == x.numel()
    _over_blocks(_reduce_scatter_kernel, x, y, y.numel(), peers, max_polls)
    return y


def all_gather(x: torch.Tensor, peers: PeerBuffers, *, max_polls: int = POLL_FOREVER) -> torch.Tensor:
    """Gathers ``[n, a]`` of each rank to ``[ranks * n, a]`` in rank order; zeros lose their sign, as in
    ``all_reduce``."""
    y = x.new_empty(x.shape[0] * peers.size, *x.shape[1:])
    assert x.is_contiguous()
    _over_blocks(_all_gather_kernel, x, y, x.numel(), peers, max_polls)
    return y


def _over_blocks(kernel: Any, x: torch.Tensor, y: torch.Tensor, count: int, peers: PeerBuffers, max_polls: int) -> None:
    """Launch ``kernel`` on ``count`` values of each rank."""
    block = _block(count, peers)
    assert x.dtype.itemsize == 2
    kernel[(-(-count // block),)](x, y, peers.buffers, peers.phases, count, max_polls, RANK=peers.rank,
                                  WORLD=peers.size, SLOT_SIZE=SLOT_VALUES, BLOCK=block, EMPTY_BITS=EMPTY_BITS,
                                  num_warps=16)
