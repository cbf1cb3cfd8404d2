"""Symmetric memory for all-to-all dispatch and combine of tokens."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...kernels.comm.dispatch_buffers import DispatchLayout, DispatchMemory
from .symmetric_memory import SymmetricBuffers


class DispatchBuffers:
    """A group's buffers, ``peers`` for the kernels. Every rank makes the same calls in the same order, on its current
    stream."""

    def __init__(self, rank: int, group: dist.ProcessGroup, device: torch.device, areas: DispatchLayout):
        """Allocates the buffers. A collective of the group; raises where the GPUs cannot see each other's memory."""
        self._buffers = SymmetricBuffers(areas.nbytes, group, device, torch.uint8, 0)
        bases = [buffer.data_ptr() for buffer in self._buffers.of_ranks]
        self.peers = DispatchMemory(rank, areas, self._buffers.own, torch.tensor(bases, device=device))
