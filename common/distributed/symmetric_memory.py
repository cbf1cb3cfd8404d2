"""Symmetric memory: buffers of a host's GPUs that each of them can read and write."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


class SymmetricBuffers:
    """One buffer on each GPU of a group: ``own`` [values], and ``of_ranks``, all ranks' as this process sees them."""

    def __init__(self, values: int, group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype,
                 fill_value: int):
        """Allocates ``values`` elements on each rank, initialised with ``fill_value``. A collective of the group;
        raises where the GPUs cannot have them."""
        # A program that used NVLink multicast and dies can leave the switch unusable for others.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symm_mem

        self.device = device
        self.own = symm_mem.empty(values, dtype=dtype, device=device)
        self.own.fill_(fill_value)
        torch.cuda.synchronize(device)  # no rank may write before all have reached the rendezvous
        self._handle = symm_mem.rendezvous(self.own, group)
        self.of_ranks = tuple(self._handle.get_buffer(peer, (values,), dtype)
                              for peer in range(dist.get_world_size(group)))
