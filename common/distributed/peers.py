"""Sums over a group's ranks through each other's memory, for messages so small that NCCL's protocol is their cost."""

from __future__ import annotations

import logging
import os

import numpy as np
import torch
import torch.distributed as dist

from ...kernels import peer_sum as kernel
from ...kernels._triton import AVAILABLE
from .parallel import Parallel
from .tp import TPGroup

log = logging.getLogger("baton.engine")

LARGEST_BYTES = 512 << 10
"""Of one message; a longer one is NCCL's."""
_TWO_SHOT_TRAFFIC = 768 << 10
"""Bytes that a rank reads in one shot before two take less: by message size times the peers."""
_DTYPES = (torch.bfloat16, torch.float16)
_TRIAL_PATIENCE = 1 << 24  # looks at a flag, about 10 s: another rank may still compile the kernel


class PeerSums:
    """A group's shared buffers. Every rank makes the same calls in the same order, on its current stream."""

    def __init__(self, rank: int, group: dist.ProcessGroup, device: torch.device):
        """A collective of the group; raises where the GPUs cannot see each other's memory."""
        # A program that used NVLink multicast and dies can leave the switch unusable for others.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symm_mem

        size = dist.get_world_size(group)
        values, flags = kernel.SLOTS * 2 * kernel.SLOT, kernel.SLOTS * size
        # One piece of memory: the buffer, and behind it the flags as pairs of 2-byte values.
        self._memory = symm_mem.empty(values + 2 * flags, dtype=torch.int16, device=device)
        self._memory.zero_()
        torch.cuda.synchronize(device)
        self._handle = symm_mem.rendezvous(self._memory, group)
        shared = [self._handle.get_buffer(peer, (values + 2 * flags,), torch.int16) for peer in range(size)]
        turns = torch.zeros(kernel.SLOTS, dtype=torch.int32, device=device)
        self._peers = {dtype: kernel.Peers(rank, tuple(one[:values].view(dtype) for one in shared),
                                           tuple(one[values:].view(torch.int32) for one in shared), turns)
                       for dtype in _DTYPES}
        self._size = size

    def takes(self, tensor: torch.Tensor) -> bool:
        return (tensor.is_cuda and tensor.dtype in self._peers and 0 < tensor.nbytes <= LARGEST_BYTES
                and tensor.is_contiguous() and tensor.data_ptr() % 16 == 0)

    def sum(self, tensor: torch.Tensor, patience: int = kernel.FOREVER) -> None:
        """Sum ``tensor``, which ``takes`` took, in place."""
        # The second kernel gives each rank an equal part of its blocks, whose sizes are powers of two.
        two_shot = self._size in (4, 8) and tensor.nbytes * (self._size - 1) > _TWO_SHOT_TRAFFIC
        kernel.peer_sum(tensor, self._peers[tensor.dtype], two_shot=two_shot, patience=patience)

    def trouble(self, group: dist.ProcessGroup) -> str | None:
        """Try sums of several sizes against NCCL's; what is wrong with them. A collective of the group.

        A rank that waits in vain gives up, so that this ends whatever is wrong.
        """
        device = self._memory.device
        generator = torch.Generator(device).manual_seed(dist.get_rank(group))
        for dtype in _DTYPES:
            for count in (8, 4096, 4096 + 8, LARGEST_BYTES // 2, 1024):
                mine = torch.randn(count, generator=generator, device=device).to(dtype)
                wanted = mine.float()
                dist.all_reduce(wanted, group=group)
                self.sum(mine, _TRIAL_PATIENCE)
                if not torch.allclose(mine.float(), wanted, atol=0.05, rtol=0.02):
                    return f"a sum of {count} values of {dtype} was wrong"
        return None


def connect_all(parallel: Parallel) -> None:
    """Give the groups of a host's GPUs that sum in every layer their shared memory. A collective of all ranks."""
    if parallel.device.type != "cuda":
        return
    for group in {id(group): group for group in (parallel.world, parallel.attention)}.values():
        if group.size > 1:
            group.peers = connect(group)


def connect(group: TPGroup) -> PeerSums | None:
    """Shared buffers of the group, a collective of it; None where its GPUs cannot have them, or do not sum right.

    A sentence in the log says why. All ranks get the same answer.
    """
    made, trouble = None, None
    assert group.device_group is not None
    try:
        if not AVAILABLE:
            raise RuntimeError("triton is not installed")
        made = PeerSums(group.rank, group.device_group, group.device)
    except Exception as error:  # the API is young, and what it raises depends on drivers and container rights
        trouble = f"{type(error).__name__}: {error}"
    if not _all(group, made is not None):
        log.warning("Small sums go over NCCL: %s.", trouble or "another rank cannot share memory")
        return None
    assert made is not None
    trouble = _tried(made, group)
    if not _all(group, trouble is None):
        log.warning("Small sums go over NCCL: %s.", trouble or "they were wrong on another rank")
        return None
    return made


def _tried(made: PeerSums, group: TPGroup) -> str | None:
    assert group.device_group is not None
    try:
        return made.trouble(group.device_group)
    except Exception as error:  # whatever a compiler does on a machine that nobody has seen
        return f"{type(error).__name__}: {error}"


def _all(group: TPGroup, fine: bool) -> bool:
    return bool(group.min_reduce(np.array([fine], np.int64))[0])
