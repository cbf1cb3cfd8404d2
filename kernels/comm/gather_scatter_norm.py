"""Rows of a few GPUs' own tokens, brought together for what all of them compute and summed up where they came from,
each in one kernel with the norm beside it: the dispatch and the combine of a decode step.

Every rank norms its rows and writes each to all others; later every rank writes its summand of each row to the rank
that the row came from, which adds them up in the ranks' order, in float32, and norms the sum. A token goes to all
ranks, not to those of its experts alone. With 8 of 128 experts a token 99.6 % of that would be sent between two ranks
anyhow, 90 % between four and 66 % between eight; in return no rank has to be told which rows come, and where to.

The protocol is peer_sum's: what has not arrived is a negative zero, row r of every rank has slot r, and slots have two
places that take turns. So ranks without tokens send as many rows as the others, which say nothing.

Programs wait for their like on other ranks alone, and start in their order: so those that have no room yet hold up
nobody who holds up them. The kernel behind starts when all of them run.
"""

from __future__ import annotations

from typing import Any

import torch

from .._triton import pdl, start_next, tl, triton, wait_for_last
from .all_reduce import EMPTY, FOREVER, SLOT, Peers, _sendable, _take


@triton.jit
def _normed(total, weight, width, eps):
    wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    return (wide * scale).to(total.dtype) * weight  # rounded first, as in rmsnorm


@triton.jit
def _summand(x_ptr, more_ptr, at, inside):
    x = tl.load(x_ptr + at, inside, other=0.0)
    if more_ptr is not None:
        x += tl.load(more_ptr + at, inside, other=0.0)
    return x


@triton.jit(do_not_specialize=["rows", "patience"])
def _peer_norm_gather_kernel(x_ptr, residual_ptr, weight_ptr, total_ptr, y_ptr, buffers, turns_ptr, rows, width, eps,
                             patience, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT_SIZE: tl.constexpr,
                             BLOCK: tl.constexpr, NOTHING: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    weight = tl.load(weight_ptr + column, inside, other=0.0)
    wait_for_last(PDL)
    start_next(PDL)  # not earlier: one kernel alone runs ahead
    turn = tl.load(turns_ptr + row)
    place = (row * 2 + turn % 2) * WORLD * SLOT_SIZE + column
    total = tl.load(x_ptr + at, inside, other=0.0) + tl.load(residual_ptr + at, inside, other=0.0)
    own = _sendable(_normed(total, weight, width, eps), NOTHING)
    for step in tl.static_range(1, WORLD):
        tl.store(buffers[(RANK + step) % WORLD] + place + RANK * SLOT_SIZE, own, inside)
    tl.store(total_ptr + at, total, inside)
    for rank in tl.static_range(WORLD):
        bits = own
        if rank != RANK:
            bits = _take(buffers[RANK] + place + rank * SLOT_SIZE, inside, patience, NOTHING)
        tl.store(y_ptr + (rank * rows + row) * width + column, bits.to(total.dtype, bitcast=True), inside)
    tl.debug_barrier()  # all have read the turn
    tl.store(turns_ptr + row, turn + 1)


@triton.jit(do_not_specialize=["rows", "patience"])
def _peer_scatter_norm_kernel(x_ptr, more_ptr, residual_ptr, weight_ptr, total_ptr, y_ptr, buffers, turns_ptr, rows,
                              width, eps, patience, RANK: tl.constexpr, WORLD: tl.constexpr, SLOT_SIZE: tl.constexpr,
                              BLOCK: tl.constexpr, NOTHING: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight = tl.load(weight_ptr + column, inside, other=0.0)
    wait_for_last(PDL)
    start_next(PDL)  # not earlier: one kernel alone runs ahead
    turn = tl.load(turns_ptr + row)
    place = (row * 2 + turn % 2) * WORLD * SLOT_SIZE + column
    for step in tl.static_range(1, WORLD):
        theirs = _summand(x_ptr, more_ptr, ((RANK + step) % WORLD * rows + row) * width + column, inside)
        tl.store(buffers[(RANK + step) % WORLD] + place + RANK * SLOT_SIZE, _sendable(theirs, NOTHING), inside)
    # Asked for before the wait, in which they come.
    at = row * width + column
    mine = _summand(x_ptr, more_ptr, RANK * rows * width + at, inside)
    residual = tl.load(residual_ptr + at, inside, other=0.0)
    whole = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(WORLD):
        if rank == RANK:
            whole += mine.to(tl.float32)
        else:
            taken = _take(buffers[RANK] + place + rank * SLOT_SIZE, inside, patience, NOTHING)
            whole += taken.to(mine.dtype, bitcast=True).to(tl.float32)
    total = whole.to(mine.dtype) + residual
    tl.debug_barrier()  # all have read the turn
    tl.store(total_ptr + at, total, inside)
    tl.store(y_ptr + at, _normed(total, weight, width, eps), inside)
    tl.store(turns_ptr + row, turn + 1)


def rows_fit(rows: int, width: int, peers: Peers) -> bool:
    """Whether so many rows of each rank can meet: each has a slot."""
    return 0 < rows <= peers.slots and width <= SLOT


def peer_norm_gather(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, peers: Peers, *,
                     patience: int = FOREVER) -> tuple[torch.Tensor, torch.Tensor]:
    """``(norm(x + residual) * weight`` of all ranks' rows ``[ranks * n, width]``, in the ranks' order, and this rank's
    ``x + residual)``.

    ``x`` and ``residual`` [n, width] are this rank's, contiguous, in bfloat16 or float16, n equal on every rank; they
    must be such that ``rows_fit``; ``weight`` [width]. Zeros of the norm lose their sign. See ``peer_sum``.
    """
    y, total = x.new_empty(len(x) * peers.size, x.shape[1]), torch.empty_like(x)
    _launch(_peer_norm_gather_kernel, (x, residual, weight, total, y), residual, eps, peers, patience)
    return y, total


def peer_scatter_norm(x: torch.Tensor, more: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor,
                      eps: float, peers: Peers, *, patience: int = FOREVER) -> tuple[torch.Tensor, torch.Tensor]:
    """``(norm(sum + residual) * weight, sum + residual)`` of this rank's rows ``[n, width]`` of the sum over the ranks
    of ``x + more`` [ranks * n, width], where there is ``more``. ``residual`` [n, width]; otherwise as
    ``peer_norm_gather``."""
    assert len(x) == len(residual) * peers.size and (more is None or more.shape == x.shape)
    y, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(_peer_scatter_norm_kernel, (x, more, residual, weight, total, y), residual, eps, peers, patience)
    return y, total


def _launch(kernel: Any, tensors: tuple[torch.Tensor | None, ...], own: torch.Tensor, eps: float, peers: Peers,
            patience: int) -> None:
    """``own`` has the form of this rank's rows."""
    rows, width = own.shape
    block = triton.next_power_of_2(width)
    assert rows_fit(rows, width, peers)
    assert all(each is None or (each.is_contiguous() and each.dtype.itemsize == 2) for each in tensors)
    kernel[(rows,)](*tensors, peers.buffers, peers.turns, rows, width, eps, patience, RANK=peers.rank,
                    WORLD=peers.size, SLOT_SIZE=SLOT, BLOCK=block, NOTHING=EMPTY,
                    num_warps=max(1, min(16, block // 256)), **pdl(own))
