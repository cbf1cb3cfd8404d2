"""Custom collectives through symmetric memory, for messages so small that NCCL's protocol dominates their cost; between
two ranks also for messages of prefill steps."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
import torch.distributed as dist

from ...kernels._triton import AVAILABLE
from ...kernels.comm import all_reduce as kernel
from ...kernels.comm import gather_scatter_norm
from ...kernels.tuning.policy import policy_of
from .parallel import Parallel
from .symmetric_memory import SymmetricBuffers
from .tp import TPGroup

log = logging.getLogger("baton.engine")

MAX_MESSAGE_BYTES = 1 << 20
"""The largest message, or what a rank sends to gather or scatter; NCCL takes longer ones. Two H200s take 6.7 us for it,
NCCL 19.5 us; more does not fit into the buffers."""
_MAX_MESSAGE_BYTES_TWO_RANKS = 32 << 20
"""The largest message of two ranks, whose sums cross the link once. Two H200s take 105 us for it including the norm
that follows; the link alone takes 85 us, NCCL 154 us and the norm 25 us."""
_SLOTS_TWO_RANKS = 2048
"""The slots that such a message takes: 128 MiB on each rank."""
MAX_GATHER_ROWS = 1024
"""Rows of a rank that one kernel norms and gathers: among 8 ranks they take 256 MiB on each."""
_TWO_SHOT_MIN_BYTES = 768 << 10
"""Bytes that a rank sends in one shot (message size times peers) above which two shots take less time."""
_DTYPES = (torch.bfloat16, torch.float16)
_SELF_TEST_WIDTH = 4096
_SELF_TEST_SHAPES = ((1, 8), (1, _SELF_TEST_WIDTH), (1, 4104),
                     (MAX_MESSAGE_BYTES // 2 // _SELF_TEST_WIDTH, _SELF_TEST_WIDTH), (3, _SELF_TEST_WIDTH))
"""Rows and widths that the self-test covers, besides the largest message."""
_SELF_TEST_MAX_POLLS = 1 << 23
"""Polls for a peer's part, about 10 s: another rank may still compile the kernel."""


class Buffers(Protocol):
    """int16 buffers of each rank, which all ranks can access."""

    device: torch.device
    of_ranks: tuple[torch.Tensor, ...]


class PeerAllReduce:
    """Symmetric-memory communicator of a group. Every rank makes the same calls in the same order, on its current
    stream. See SmallAllReduce."""

    def __init__(self, rank: int, buffers: Buffers, slots: int = kernel.MIN_SLOTS):
        """``slots``: rows of each rank that one kernel can gather; the buffers have as many values as they take."""
        self._size = len(buffers.of_ranks)
        self._buffers = buffers
        self._max_bytes = (min(_MAX_MESSAGE_BYTES_TWO_RANKS, 2 * slots * kernel.SLOT_VALUES) if self._size == 2
                           else MAX_MESSAGE_BYTES)
        self.shared = kernel.PeerBuffers(rank, buffers.of_ranks,
                                         torch.zeros(slots, dtype=torch.int32, device=buffers.device))

    def can_all_reduce(self, tensor: torch.Tensor) -> bool:
        """Decides by what is equal on all ranks, so that they decide alike. Under a batch-invariant policy, too: sums
        are in the ranks' order, in float32, as TPGroup's are then, so that the choice by size changes no bit. The
        fused norm does not add as the norm by itself."""
        return self._fits(tensor, tensor.nbytes)

    def _fits(self, tensor: torch.Tensor, sent_bytes: int) -> bool:
        return (tensor.is_cuda and tensor.dtype in _DTYPES and 0 < sent_bytes <= self._max_bytes
                and tensor.is_contiguous())

    def all_reduce(self, tensor: torch.Tensor, max_polls: int = kernel.POLL_FOREVER) -> None:
        """Sums ``tensor`` over the ranks, in place."""
        kernel.all_reduce(tensor, self.shared, two_shots=self._takes_two_shots(tensor), max_polls=max_polls)

    def can_all_reduce_norm(self, rows: torch.Tensor) -> bool:
        count, width = rows.shape
        return (self.can_all_reduce(rows) and kernel.rows_per_program(count, width, self.shared.slots) is not None
                and not policy_of(rows.device).batch_invariant)

    def all_reduce_norm(self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                        max_polls: int = kernel.POLL_FOREVER) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(norm(sum + residual) * weight, sum + residual)`` of ``rows`` [T, hidden]."""
        return kernel.all_reduce_rmsnorm(rows, residual, weight, eps, self.shared,
                                         two_shots=self._takes_two_shots(rows), max_polls=max_polls)

    def warm_up(self, width: int, dtype: torch.dtype) -> None:
        """Compiles ``all_reduce_norm`` for rows of ``width`` values, so that no request waits for it; all ranks call
        it.
        """
        if dtype not in _DTYPES:
            return
        weight = torch.ones(width, dtype=dtype, device=self._buffers.device)
        for rows in _warm_up_rows(width, self.shared.slots):
            x = weight.new_zeros(rows, width)
            if self.can_all_reduce_norm(x):
                self.all_reduce_norm(x, x, weight, 1e-5)

    def can_reduce_scatter(self, rows: torch.Tensor) -> bool:
        return (self._fits(rows, rows.nbytes // self._size * (self._size - 1))
                and not policy_of(rows.device).batch_invariant)

    def reduce_scatter(self, rows: torch.Tensor, max_polls: int = kernel.POLL_FOREVER) -> torch.Tensor:
        """Returns this rank's part of the sum of ``rows`` [ranks * n, ...]."""
        return kernel.reduce_scatter(rows, self.shared, max_polls=max_polls)

    def can_all_gather(self, rows: torch.Tensor) -> bool:
        return self._fits(rows, rows.nbytes * (self._size - 1))

    def all_gather(self, rows: torch.Tensor, max_polls: int = kernel.POLL_FOREVER) -> torch.Tensor:
        """Gathers the ranks' ``rows`` [n, ...] to ``[ranks * n, ...]``."""
        return kernel.all_gather(rows, self.shared, max_polls=max_polls)

    def can_norm_gather(self, rows: torch.Tensor) -> bool:
        fits = gather_scatter_norm.fits_slots
        return (rows.is_cuda and rows.dtype in _DTYPES and fits(len(rows), rows.shape[1], self.shared)
                and not policy_of(rows.device).batch_invariant)

    def norm_gather(self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                    max_polls: int = kernel.POLL_FOREVER) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norms of all ranks' ``rows + residual`` [ranks * n, hidden], and this rank's sum."""
        return gather_scatter_norm.rmsnorm_all_gather(rows.contiguous(), residual, weight, eps, self.shared,
                                                    max_polls=max_polls)

    def reduce_scatter_norm(self, rows: torch.Tensor, addend: torch.Tensor | None, residual: torch.Tensor,
                            weight: torch.Tensor, eps: float,
                            max_polls: int = kernel.POLL_FOREVER) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(norm(own + residual) * weight, own + residual)``, where ``own`` is this rank's part of the sum of
        ``rows + addend`` [ranks * n, hidden]."""
        addend = None if addend is None else addend.contiguous()
        return gather_scatter_norm.reduce_scatter_rmsnorm(rows.contiguous(), addend, residual, weight, eps, self.shared,
                                                     max_polls=max_polls)

    def _takes_two_shots(self, tensor: torch.Tensor) -> bool:
        """Two ranks send as much in one shot; the two-shot kernel takes powers of two only."""
        return self._size in (4, 8) and tensor.nbytes * (self._size - 1) > _TWO_SHOT_MIN_BYTES

    def self_test(self, group: dist.ProcessGroup) -> str | None:
        """Compares sums of several sizes, with and without norm, with NCCL's; returns what is wrong, or None. A
        collective of the group.

        A rank that waits in vain gives up, so that this ends whatever is wrong.
        """
        device = self._buffers.device
        generator = torch.Generator(device).manual_seed(dist.get_rank(group))
        max_polls, failure = _SELF_TEST_MAX_POLLS, None
        largest = (self._max_bytes // 2 // _SELF_TEST_WIDTH, _SELF_TEST_WIDTH)
        for dtype in _DTYPES:
            weight = torch.ones(_SELF_TEST_WIDTH, device=device, dtype=dtype)
            # All shapes on every rank, even after a failure: NCCL's sums need all ranks.
            for rows, width in (*_SELF_TEST_SHAPES, largest):
                mine = torch.randn(rows, width, generator=generator, device=device).to(dtype)
                expected = mine.float()
                dist.all_reduce(expected, group=group)
                right = True
                if width == _SELF_TEST_WIDTH:
                    y, total = self.all_reduce_norm(mine, torch.ones_like(mine), weight, 1e-5, max_polls)
                    normed = torch.nn.functional.rms_norm(expected + 1, (width,), eps=1e-5)
                    right = _close(total, expected + 1) and _close(y, normed)
                gathered = self.all_gather(mine, max_polls)
                # Equal rows on every rank sum to a multiple of them.
                summed = self.reduce_scatter(gathered, max_polls).float() / self._size
                right = right and _close(summed, mine.float())
                if width == _SELF_TEST_WIDTH and self.can_norm_gather(mine):
                    right = right and self._norm_gather_is_right(mine, weight, max_polls)
                self.all_reduce(mine, max_polls)
                if not (right and _close(mine, expected)):
                    max_polls, failure = 1, failure or f"a sum of {rows} x {width} values of {dtype} was wrong"
        return failure

    def _norm_gather_is_right(self, mine: torch.Tensor, weight: torch.Tensor, max_polls: int) -> bool:
        """Returns whether ``mine`` survives ``norm_gather`` and ``reduce_scatter_norm``."""
        rows, total = self.norm_gather(mine, torch.ones_like(mine), weight, 1e-5, max_polls)
        back, doubled = self.reduce_scatter_norm(rows, torch.zeros_like(rows), torch.zeros_like(mine), weight, 1e-5,
                                                 max_polls)
        width = (mine.shape[1],)
        normed = torch.nn.functional.rms_norm(mine.float() + 1, width, eps=1e-5)
        return (_close(total, mine.float() + 1) and _close(doubled / self._size, normed)
                and _close(back, torch.nn.functional.rms_norm(normed, width, eps=1e-5)))


def _warm_up_rows(width: int, slots: int) -> list[int]:
    """Returns the fewest rows at which a program takes one row, two rows, and so on."""
    fewest: dict[int, int] = {}
    rows = 1
    while (each := kernel.rows_per_program(rows, width, slots)) is not None:
        fewest.setdefault(each, rows)
        rows *= 2
    return sorted(fewest.values())


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(actual.float(), expected, atol=0.1, rtol=0.02)


def connect_all(parallel: Parallel, rows: int = 0) -> None:
    """Gives the groups of a host's GPUs that communicate in every layer a ``symm_comm``. A collective of all ranks.

    ``rows``: the rows of each rank that one kernel must be able to gather.
    """
    if parallel.device.type != "cuda":
        return
    groups = [parallel.tp, parallel.attn_tp]
    if parallel.attn_tp.size > 1:
        groups.append(parallel.dp)
    for group in {id(group): group for group in groups}.values():
        if group.device_group is not None:
            group.symm_comm = connect(group, slots_for(group.size, rows))
    if parallel.dp.size == parallel.tp.size:  # the same ranks
        parallel.dp.symm_comm = parallel.tp.symm_comm


def slots_for(ranks: int, rows: int = 0) -> int:
    """Returns the slots of a group's buffers; ``rows`` as in ``connect_all``."""
    return max(_SLOTS_TWO_RANKS if ranks == 2 else kernel.MIN_SLOTS, min(rows, MAX_GATHER_ROWS))


def connect(group: TPGroup, slots: int = kernel.MIN_SLOTS) -> PeerAllReduce | None:
    """Allocates shared buffers, a collective of the group; returns None where its GPUs cannot have them, or the
    self-test fails.

    A warning says why. All ranks get the same answer.
    """
    comm, failure = None, None
    assert group.device_group is not None
    try:
        if not AVAILABLE:
            raise RuntimeError("triton is not installed")
        values = kernel.buffer_values(group.size, slots)
        buffers = SymmetricBuffers(values, group.device_group, group.device, torch.int16, kernel.EMPTY_BITS)
        comm = PeerAllReduce(group.rank, buffers, slots)
    except Exception as error:  # the API is young, and what it raises depends on drivers and container rights
        failure = f"{type(error).__name__}: {error}"
    if not group.all_true(comm is not None):
        log.warning("Small sums go over NCCL: %s.", failure or "another rank cannot share memory")
        return None
    assert comm is not None
    failure = _self_test(comm, group)
    if not group.all_true(failure is None):
        log.warning("Small sums go over NCCL: %s.", failure or "they were wrong on another rank")
        return None
    return comm


def _self_test(comm: PeerAllReduce, group: TPGroup) -> str | None:
    assert group.device_group is not None
    try:
        return comm.self_test(group.device_group)
    except Exception as error:  # whatever a compiler does on an unknown machine
        return f"{type(error).__name__}: {error}"
