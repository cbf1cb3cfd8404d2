"""Sums through each other's memory for ranks that may share a GPU, where torch's symmetric memory refuses: buffers come
from the other processes by CUDA IPC."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from baton.common.distributed.peers import PeerSums
from baton.common.distributed.tp import TPGroup
from baton.kernels.peer_sum import EMPTY, SLOTS, buffer_values


class IpcBuffers:
    def __init__(self, values: int, world: TPGroup):
        """So many of each rank of the world. A collective of it."""
        self.device = world.device
        mine = torch.full((values,), EMPTY, dtype=torch.int16, device=world.device)
        torch.cuda.synchronize(world.device)
        told: list = [None] * world.size
        dist.all_gather_object(told, reduce_tensor(mine))
        self.of_ranks = tuple(mine if rank == world.rank else rebuild(*given)
                              for rank, (rebuild, given) in enumerate(told))
        for buffer in self.of_ranks:  # copies either way let the GPUs see each other's memory
            buffer[:8].copy_(mine[:8])
            assert bool((buffer[:8].to(world.device) == EMPTY).all())
        torch.cuda.synchronize(world.device)
        world.barrier()


def ipc_sums(world: TPGroup, slots: int = SLOTS) -> PeerSums:
    """Of all ranks; ``slots`` of each can meet."""
    return PeerSums(world.rank, IpcBuffers(buffer_values(world.size, slots), world), slots)
