"""Memory of a host's GPUs that each of them can read and write."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


class SymmetricBuffers:
    """One on each GPU of a group: ``own`` [values], and ``of_ranks`` as this process sees them all."""

    def __init__(self, values: int, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype,
                 begin: int):
        """So many values of each rank, which all ``begin`` as this. A collective of the group; raises where the GPUs
        cannot have them."""
        # A program that used NVLink multicast and dies can leave the switch unusable for others.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symm_mem

        self.device = device
        self.own = symm_mem.empty(values, dtype=dtype, device=device)
        self.own.fill_(begin)
        torch.cuda.synchronize(device)  # nobody writes before all have met below
        self._handle = symm_mem.rendezvous(self.own, group)
        self.of_ranks = tuple(self._handle.get_buffer(peer, (values,), dtype)
                              for peer in range(dist.get_world_size(group)))
