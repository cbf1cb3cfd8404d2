"""Low-latency dispatch and combine of a decode step over a few GPUs: an all-gather of normed rows, and a reduce-scatter
followed by the norm, each fused into one kernel.

Every rank norms its rows and writes each to all others; later every rank writes its summand of each row to the rank
that the row came from, which adds them up in the ranks' order, in float32, and norms the sum. A token goes to all
ranks, not only to those of its experts. With 8 of 128 experts a token 99.6 % of that would be sent between two ranks
anyhow, 90 % between four and 66 % between eight; in return no rank needs to know which rows come, and where to.

The protocol is all_reduce's: what has not arrived is a negative zero, row r of every rank has slot r, and slots are
double-buffered. So ranks without tokens send as many rows as the others, with arbitrary values.

A program waits only for the same program on other ranks, and programs start in order: so one that is not resident yet
never blocks one that it waits for. The next kernel starts when all of them run.
"""

from __future__ import annotations

from typing import Any

import torch

from .._triton import pdl, start_next, tl, triton, wait_for_last
from .all_reduce import EMPTY_BITS, POLL_FOREVER, SLOT_VALUES, PeerBuffers, _receive, _to_sendable_bits


@triton.jit
def _normed(total, weight, width, eps):
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    return ((wide * scale).to(weight.dtype) * weight).to(total.dtype)  # rounded first, as in rmsnorm


@triton.jit
def _summand(x_ptr, more_ptr, at, inside):
    x = tl.load(x_ptr + at, inside, other=0.0)
    if more_ptr is not None:
        x += tl.load(more_ptr + at, inside, other=0.0)
    return x


@triton.jit(do_not_specialize=["rows", "max_polls"])
def _rmsnorm_all_gather_kernel(x_ptr, residual_ptr, weight_ptr, total_ptr, y_ptr, buffers, phases_ptr, rows, width, eps,
                               max_polls, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT_SIZE: tl.constexpr,
                               BLOCK: tl.constexpr, EMPTY_BITS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    weight = tl.load(weight_ptr + column, inside, other=0.0)
    wait_for_last(PDL)
    start_next(PDL)  # not earlier: one kernel alone runs ahead
    phase = tl.load(phases_ptr + row)
    base = (row * 2 + phase % 2) * WORLD * SLOT_SIZE + column
    total = tl.load(x_ptr + at, inside, other=0.0) + tl.load(residual_ptr + at, inside, other=0.0)
    own = _to_sendable_bits(_normed(total, weight, width, eps), EMPTY_BITS)
    for step in tl.static_range(1, WORLD):
        tl.store(buffers[(RANK + step) % WORLD] + base + RANK * SLOT_SIZE, own, inside)
    tl.store(total_ptr + at, total, inside)
    for rank in tl.static_range(WORLD):
        bits = own
        if rank != RANK:
            bits = _receive(buffers[RANK] + base + rank * SLOT_SIZE, inside, max_polls, EMPTY_BITS)
        tl.store(y_ptr + (rank * rows + row) * width + column, bits.to(total.dtype, bitcast=True), inside)
    tl.debug_barrier()  # all have read the phase
    tl.store(phases_ptr + row, phase + 1)


@triton.jit(do_not_specialize=["rows", "max_polls"])
def _reduce_scatter_rmsnorm_kernel(x_ptr, more_ptr, residual_ptr, weight_ptr, total_ptr, y_ptr, buffers, phases_ptr,
                                   rows, width, eps, max_polls, RANK: tl.constexpr, WORLD: tl.constexpr,
                                   SLOT_SIZE: tl.constexpr, BLOCK: tl.constexpr, EMPTY_BITS: tl.constexpr,
                                   PDL: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, inside, other=0.0)
    wait_for_last(PDL)
    start_next(PDL)  # not earlier: one kernel alone runs ahead
    phase = tl.load(phases_ptr + row)
    base = (row * 2 + phase % 2) * WORLD * SLOT_SIZE + column
    for step in tl.static_range(1, WORLD):
        theirs = _summand(x_ptr, more_ptr, ((RANK + step) % WORLD * rows + row) * width + column, inside)
        tl.store(buffers[(RANK + step) % WORLD] + base + RANK * SLOT_SIZE, _to_sendable_bits(theirs, EMPTY_BITS),
                 inside)
    # Loaded before the wait, which hides their latency.
    at = row * width + column
    mine = _summand(x_ptr, more_ptr, RANK * rows * width + at, inside)
    residual = tl.load(residual_ptr + at, inside, other=0.0)
    whole = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            whole += mine.to(tl.float32)
        else:
            taken = _receive(buffers[RANK] + base + rank * SLOT_SIZE, inside, max_polls, EMPTY_BITS)
            whole += taken.to(mine.dtype, bitcast=True).to(tl.float32)
    total = whole.to(mine.dtype) + residual
    tl.debug_barrier()  # all have read the phase
    tl.store(total_ptr + at, total, inside)
    tl.store(y_ptr + at, _normed(total, weight, width, eps), inside)
    tl.store(phases_ptr + row, phase + 1)


def fits_slots(rows: int, width: int, peers: PeerBuffers) -> bool:
    """Says whether the buffers have a slot for each of ``rows`` rows of a rank."""
    return 0 < rows <= peers.slots and width <= SLOT_VALUES


def rmsnorm_all_gather(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, peers: PeerBuffers, *,
                       max_polls: int = POLL_FOREVER) -> tuple[torch.Tensor, torch.Tensor]:
    """``(norm(x + residual) * weight`` of all ranks' rows ``[ranks * n, width]``, in the ranks' order, and this rank's
    ``x + residual)``.

    ``x`` and ``residual`` [n, width] are this rank's, contiguous, in bfloat16 or float16, n equal on every rank; they
    must be such that ``fits_slots``; ``weight`` [width]. Zeros of the norm lose their sign. See ``all_reduce``.
    """
    y, total = x.new_empty(len(x) * peers.size, x.shape[1]), torch.empty_like(x)
    _launch(_rmsnorm_all_gather_kernel, (x, residual, weight, total, y), residual, eps, peers, max_polls)
    return y, total


def reduce_scatter_rmsnorm(x: torch.Tensor, more: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor,
                           eps: float, peers: PeerBuffers, *,
                           max_polls: int = POLL_FOREVER) -> tuple[torch.Tensor, torch.Tensor]:
    """``(norm(sum + residual) * weight, sum + residual)`` of this rank's rows ``[n, width]`` of the sum over the ranks
    of ``x + more`` [ranks * n, width], where there is ``more``. ``residual`` [n, width]; otherwise as
    ``rmsnorm_all_gather``."""
    assert len(x) == len(residual) * peers.size and (more is None or more.shape == x.shape)
    y, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(_reduce_scatter_rmsnorm_kernel, (x, more, residual, weight, total, y), residual, eps, peers, max_polls)
    return y, total


def _launch(kernel: Any, tensors: tuple[torch.Tensor | None, ...], own: torch.Tensor, eps: float, peers: PeerBuffers,
            max_polls: int) -> None:
    """Launch ``kernel``; ``own`` has the shape of this rank's rows."""
    rows, width = own.shape
    block = triton.next_power_of_2(width)
    assert fits_slots(rows, width, peers)
    assert all(each is None or (each.is_contiguous() and each.dtype.itemsize == 2) for each in tensors)
    kernel[(rows,)](*tensors, peers.buffers, peers.phases, rows, width, eps, max_polls, RANK=peers.rank,
                    WORLD=peers.size, SLOT_SIZE=SLOT_VALUES, BLOCK=block, EMPTY_BITS=EMPTY_BITS,
                    num_warps=max(1, min(16, block // 256)), **pdl(own))
