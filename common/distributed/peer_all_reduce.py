"""Sums over a group's ranks through each other's memory, for messages so small that NCCL's protocol is their cost; of
two ranks also for those of prompts."""

from __future__ import annotations

import logging
from typing import Protocol

import torch
import torch.distributed as dist

from ...kernels._triton import AVAILABLE
from ...kernels.comm import all_reduce as kernel
from ...kernels.comm import gather_scatter_norm
from .parallel import Parallel
from .symmetric_memory import SymmetricBuffers
from .tp import TPGroup

log = logging.getLogger("baton.engine")

LARGEST_BYTES = 1 << 20
"""Of one message, or of what a rank sends to gather or scatter; a longer one is NCCL's. Two H200s take 6.7 us
for it, NCCL 19.5 us; more does not fit into the buffers."""
_LARGEST_OF_TWO = 32 << 20
"""Of two ranks, whose sums cross the link once. Two H200s take 105 us for it with the norm behind, where the link alone
takes 85, and NCCL 154 and the norm 25."""
_SLOTS_OF_TWO = 2048
"""What such a message takes: 128 MiB of each rank."""
MOST_ROWS = 1024
"""Of a rank that meet others in one kernel: of 8 ranks they take 256 MiB of each."""
_TWO_SHOT_TRAFFIC = 768 << 10
"""Bytes that a rank sends in one shot before two take less: message size times the peers."""
_DTYPES = (torch.bfloat16, torch.float16)
_TRIAL_WIDTH = 4096
_TRIALS = ((1, 8), (1, _TRIAL_WIDTH), (1, 4104), (LARGEST_BYTES // 2 // _TRIAL_WIDTH, _TRIAL_WIDTH), (3, _TRIAL_WIDTH))
"""Rows and their width, besides the most."""
_TRIAL_PATIENCE = 1 << 23  # looks for a peer's part, about 10 s: another rank may still compile the kernel


class Buffers(Protocol):
    """int16 values of each rank, which all ranks see."""

    device: torch.device
    of_ranks: tuple[torch.Tensor, ...]


class PeerAllReduce:
    """A group's way through shared buffers. Every rank makes the same calls in the same order, on its current stream.
    """

    def __init__(self, rank: int, buffers: Buffers, slots: int = kernel.MIN_SLOTS):
        """``slots``: rows of each rank that can meet; the buffers have as many values as they take."""
        self._size = len(buffers.of_ranks)
        self._buffers = buffers
        self._largest = min(_LARGEST_OF_TWO, 2 * slots * kernel.SLOT_VALUES) if self._size == 2 else LARGEST_BYTES
        self.shared = kernel.PeerBuffers(rank, buffers.of_ranks,
                                         torch.zeros(slots, dtype=torch.int32, device=buffers.device))

    def takes(self, tensor: torch.Tensor) -> bool:
        """By what is equal on all ranks, as the others do."""
        return self._takes(tensor, tensor.nbytes)

    def _takes(self, tensor: torch.Tensor, sent: int) -> bool:
        return (tensor.is_cuda and tensor.dtype in _DTYPES and 0 < sent <= self._largest and tensor.is_contiguous())

    def sum(self, tensor: torch.Tensor, patience: int = kernel.POLL_FOREVER) -> None:
        """Sum ``tensor``, which ``takes`` took, in place."""
        kernel.all_reduce(tensor, self.shared, two_shots=self._in_two(tensor), max_polls=patience)

    def takes_rows(self, rows: torch.Tensor) -> bool:
        count, width = rows.shape
        return self.takes(rows) and kernel.rows_per_program(count, width, self.shared.slots) is not None

    def sum_normed(self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                   patience: int = kernel.POLL_FOREVER) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(sum + residual) * weight, sum + residual)`` of ``rows`` [T, hidden], which ``takes_rows`` took."""
        return kernel.all_reduce_rmsnorm(rows, residual, weight, eps, self.shared, two_shots=self._in_two(rows),
                                    max_polls=patience)

    def warm_up(self, width: int, dtype: torch.dtype) -> None:
        """Compile all that norms sums of rows of ``width`` values, so that no request waits for it; all ranks call it.
        """
        if dtype not in _DTYPES:
            return
        weight = torch.ones(width, dtype=dtype, device=self._buffers.device)
        for rows in _fewest_rows(width, self.shared.slots):
            x = weight.new_zeros(rows, width)
            if self.takes_rows(x):
                self.sum_normed(x, x, weight, 1e-5)

    def scatters(self, rows: torch.Tensor) -> bool:
        return self._takes(rows, rows.nbytes // self._size * (self._size - 1))

    def scatter_sum(self, rows: torch.Tensor, patience: int = kernel.POLL_FOREVER) -> torch.Tensor:
        """This rank's part of the sum of ``rows`` [ranks * n, ...], which ``scatters`` took."""
        return kernel.reduce_scatter(rows, self.shared, max_polls=patience)

    def gathers(self, rows: torch.Tensor) -> bool:
        return self._takes(rows, rows.nbytes * (self._size - 1))

    def gather(self, rows: torch.Tensor, patience: int = kernel.POLL_FOREVER) -> torch.Tensor:
        """The ranks' ``rows`` [n, ...], which ``gathers`` took, to ``[ranks * n, ...]``."""
        return kernel.all_gather(rows, self.shared, max_polls=patience)

    def meets(self, rows: torch.Tensor) -> bool:
        fits = gather_scatter_norm.fits_slots
        return rows.is_cuda and rows.dtype in _DTYPES and fits(len(rows), rows.shape[1], self.shared)

    def gather_normed(self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float,
                      patience: int = kernel.POLL_FOREVER) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms of all ranks' ``rows + residual`` [ranks * n, hidden] and this rank's sum, of what ``meets``."""
        return gather_scatter_norm.rmsnorm_all_gather(rows.contiguous(), residual, weight, eps, self.shared,
                                                    max_polls=patience)

    def scatter_normed(self, rows: torch.Tensor, more: torch.Tensor | None, residual: torch.Tensor,
                       weight: torch.Tensor, eps: float,
                       patience: int = kernel.POLL_FOREVER) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm and the total of this rank's part of the sum of ``rows + more`` [ranks * n, hidden], and
        ``residual``, which ``meets``."""
        more = None if more is None else more.contiguous()
        return gather_scatter_norm.reduce_scatter_rmsnorm(rows.contiguous(), more, residual, weight, eps, self.shared,
                                           max_polls=patience)

    def _in_two(self, tensor: torch.Tensor) -> bool:
        """Two ranks send as much in one shot; shares of other sizes than a power of two are not to be had."""
        return self._size in (4, 8) and tensor.nbytes * (self._size - 1) > _TWO_SHOT_TRAFFIC

    def trouble(self, group: dist.ProcessGroup) -> str | None:
        """Try sums of several sizes, plain and normed, against NCCL's; what is wrong. A collective of the group.

        A rank that waits in vain gives up, so that this ends whatever is wrong.
        """
        device = self._buffers.device
        generator = torch.Generator(device).manual_seed(dist.get_rank(group))
        patience, found = _TRIAL_PATIENCE, None
        most = (self._largest // 2 // _TRIAL_WIDTH, _TRIAL_WIDTH)
        for dtype in _DTYPES:
            weight = torch.ones(_TRIAL_WIDTH, device=device, dtype=dtype)
            # All of them on every rank, whatever is found: NCCL's sums need all ranks.
            for rows, width in (*_TRIALS, most):
                mine = torch.randn(rows, width, generator=generator, device=device).to(dtype)
                wanted = mine.float()
                dist.all_reduce(wanted, group=group)
                right = True
                if width == _TRIAL_WIDTH:
                    y, total = self.sum_normed(mine, torch.ones_like(mine), weight, 1e-5, patience)
                    normed = torch.nn.functional.rms_norm(wanted + 1, (width,), eps=1e-5)
                    right = _close(total, wanted + 1) and _close(y, normed)
                gathered = self.gather(mine, patience)
                summed = self.scatter_sum(gathered, patience).float() / self._size  # of equal rows on every rank
                right = right and _close(summed, mine.float())
                if width == _TRIAL_WIDTH and self.meets(mine):
                    right = right and self._meets_right(mine, weight, patience)
                self.sum(mine, patience)
                if not (right and _close(mine, wanted)):
                    patience, found = 1, found or f"a sum of {rows} x {width} values of {dtype} was wrong"
        return found

    def _meets_right(self, mine: torch.Tensor, weight: torch.Tensor, patience: int) -> bool:
        """Whether ``mine`` meets the others' rows and comes back from them, each time once behind the norm."""
        rows, total = self.gather_normed(mine, torch.ones_like(mine), weight, 1e-5, patience)
        back, doubled = self.scatter_normed(rows, torch.zeros_like(rows), torch.zeros_like(mine), weight, 1e-5,
                                            patience)
        width = (mine.shape[1],)
        normed = torch.nn.functional.rms_norm(mine.float() + 1, width, eps=1e-5)
        return (_close(total, mine.float() + 1) and _close(doubled / self._size, normed)
                and _close(back, torch.nn.functional.rms_norm(normed, width, eps=1e-5)))


def _fewest_rows(width: int, slots: int) -> list[int]:
    """For which programs take one row each, for which two, and so on."""
    found: dict[int, int] = {}
    rows = 1
    while (each := kernel.rows_per_program(rows, width, slots)) is not None:
        found.setdefault(each, rows)
        rows *= 2
    return sorted(found.values())


def _close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found.float(), wanted, atol=0.1, rtol=0.02)


def connect_all(parallel: Parallel, rows: int = 0) -> None:
    """Give the groups of a host's GPUs that meet in every layer their shared memory. A collective of all ranks.

    ``rows`` of each rank are to meet in one kernel.
    """
    if parallel.device.type != "cuda":
        return
    groups = [parallel.world, parallel.attention]
    if parallel.attention.size > 1:
        groups.append(parallel.across)
    for group in {id(group): group for group in groups}.values():
        if group.device_group is not None:
            group.peers = connect(group, slots_for(group.size, rows))
    if parallel.across.size == parallel.world.size:  # the same ranks
        parallel.across.peers = parallel.world.peers


def slots_for(ranks: int, rows: int = 0) -> int:
    """Of a group's buffers; ``rows`` as in ``connect_all``."""
    return max(_SLOTS_OF_TWO if ranks == 2 else kernel.MIN_SLOTS, min(rows, MOST_ROWS))


def connect(group: TPGroup, slots: int = kernel.MIN_SLOTS) -> PeerAllReduce | None:
    """Shared buffers of the group, a collective of it; None where its GPUs cannot have them, or do not sum right.

    A sentence in the log says why. All ranks get the same answer.
    """
    made, trouble = None, None
    assert group.device_group is not None
    try:
        if not AVAILABLE:
            raise RuntimeError("triton is not installed")
        values = kernel.buffer_values(group.size, slots)
        buffers = SymmetricBuffers(values, group.device_group, group.device, torch.int16, kernel.EMPTY_BITS)
        made = PeerAllReduce(group.rank, buffers, slots)
    except Exception as error:  # the API is young, and what it raises depends on drivers and container rights
        trouble = f"{type(error).__name__}: {error}"
    if not group.all_true(made is not None):
        log.warning("Small sums go over NCCL: %s.", trouble or "another rank cannot share memory")
        return None
    assert made is not None
    trouble = _tried(made, group)
    if not group.all_true(trouble is None):
        log.warning("Small sums go over NCCL: %s.", trouble or "they were wrong on another rank")
        return None
    return made


def _tried(made: PeerAllReduce, group: TPGroup) -> str | None:
    assert group.device_group is not None
    try:
        return made.trouble(group.device_group)
    except Exception as error:  # whatever a compiler does on a machine that nobody has seen
        return f"{type(error).__name__}: {error}"
