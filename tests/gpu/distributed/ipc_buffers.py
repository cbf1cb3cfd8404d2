"""Sums through each other's memory for ranks that may share a GPU, where torch's symmetric memory refuses: buffers come
from the other processes by CUDA IPC."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import reduce_tensor

from baton.common.distributed.peer_all_reduce import PeerAllReduce
from baton.common.distributed.tp import TPGroup
from baton.kernels.comm.all_reduce import EMPTY_BITS, MIN_SLOTS, buffer_values


class IpcBuffers:
    def __init__(self, values: int, world: TPGroup):
        """So many of each rank of the world. A collective of it."""
        self.device = world.device
        mine = torch.full((values,), EMPTY_BITS, dtype=torch.int16, device=world.device)
        torch.cuda.synchronize(world.device)
        told: list = [None] * world.size
        dist.all_gather_object(told, reduce_tensor(mine))
        self.of_ranks = tuple(mine if rank == world.rank else _opened(*one, world.device)
                              for rank, one in enumerate(told))
        assert all(bool((buffer[:8] == EMPTY_BITS).all()) for buffer in self.of_ranks)
        torch.cuda.synchronize(world.device)
        world.barrier()


def _opened(rebuild: Callable[..., torch.Tensor], given: tuple, device: torch.device) -> torch.Tensor:
    """A tensor of another process, whose writes have ended, as this ``device`` sees it. Opened on the device where it
    lies, as torch would, kernels of another one could not read it."""
    named = dict(zip(signature(rebuild).parameters, given, strict=True))
    return rebuild(**named | {"storage_device": device.index, "event_sync_required": False})


def ipc_sums(world: TPGroup, slots: int = MIN_SLOTS) -> PeerAllReduce:
    """Of all ranks; ``slots`` of each can meet."""
    return PeerAllReduce(world.rank, IpcBuffers(buffer_values(world.size, slots), world), slots)
