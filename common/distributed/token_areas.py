"""Memory of a host's GPUs in which tokens meet their experts and come back."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from ...kernels.peer_areas import Areas, PeerAreas


class SharedAreas:
    """A group's, ``peers`` for the kernels. Every rank makes the same calls in the same order, on its current stream.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup, device: torch.device, areas: Areas):
        """A collective of the group; raises where the GPUs cannot see each other's memory."""
        # A program that used NVLink multicast and dies can leave the switch unusable for others.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symm_mem

        self._memory = symm_mem.empty(areas.nbytes, dtype=torch.uint8, device=device)
        self._memory.zero_()
        torch.cuda.synchronize(device)  # nobody counts itself in before all have met below
        self._handle = symm_mem.rendezvous(self._memory, group)
        bases = [self._handle.get_buffer(peer, (areas.nbytes,), torch.uint8).data_ptr() for peer in range(areas.ranks)]
        self.peers = PeerAreas(rank, areas, self._memory, torch.tensor(bases, device=device))
