"""Memory of a host's GPUs in which tokens meet their experts and come back."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...kernels.comm.dispatch_buffers import DispatchLayout, DispatchMemory
from .symmetric_memory import SymmetricBuffers


class DispatchBuffers:
    """A group's, ``peers`` for the kernels. Every rank makes the same calls in the same order, on its current stream.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup, device: torch.device, layout: DispatchLayout):
        """A collective of the group; raises where the GPUs cannot see each other's memory."""
        self._buffers = SymmetricBuffers(layout.nbytes, group, device, torch.uint8, 0)
        bases = [buffer.data_ptr() for buffer in self._buffers.of_ranks]
        self.peers = DispatchMemory(rank, layout, self._buffers.own, torch.tensor(bases, device=device))
