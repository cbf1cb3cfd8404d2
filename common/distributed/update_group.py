"""The process group of a trainer and of the engines that it sends weights to.

Its members are processes of different programs, so that none has the others in its default group: each joins by the
address of rank 0, which is the trainer's first. The keys are those of torch.distributed's groups of this name, as
SGLang, verl, slime and OpenRLHF make them: a trainer that joins by their ``init_custom_process_group`` meets engines
that join by ``join_update_group``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

DEFAULT_TIMEOUT = 1800.0
"""Seconds to wait for the other members, and for a broadcast."""


class UpdateGroup:
    """A member of the group ``name``; tensors are on ``device``, a GPU's with the backend nccl."""

    def __init__(self, group: Any, store: Store, name: str, device: torch.device):
        self.name = name
        self.device = device
        self._group = group
        self._store = store  # rank 0's is the server that the others meet at

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites ``tensor`` with that of rank ``src``, in place, and waits for it; returns it. Raises RuntimeError
        where a member has left, or the timeout has passed."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor], options).wait()
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        return tensor

    def close(self) -> None:
        """Leaves the group, without waiting for the other members: NCCL's shutdown returned after more than 40 s where
        the trainer stayed, and an engine's steps would wait as long."""
        if self.device.type == "cuda":
            leave = getattr(self._group, "abort", self._group.shutdown)
            threading.Thread(target=leave, name=f"leave {self.name}", daemon=True).start()
        else:
            self._group.shutdown()


def join_update_group(backend: str, master_address: str, master_port: int, rank: int, world_size: int,
                      group_name: str = "weight_update_group", *, device: torch.device | str = "cpu",
                      timeout: float = DEFAULT_TIMEOUT) -> UpdateGroup:
    """Joins the group; waits up to ``timeout`` seconds for the other members. ``backend`` is nccl or gloo; ``device``
    is that of nccl's tensors.

    Raises RuntimeError (torch.distributed's errors) where the others do not come, ValueError for another backend.
    """
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"The backend {backend!r} is neither nccl nor gloo.")
    limit = timedelta(seconds=timeout)
    store = TCPStore(master_address, master_port, world_size, is_master=rank == 0, timeout=limit,
                          multi_tenant=True)
    kind = "cuda" if backend == "nccl" else "cpu"
    keys = PrefixStore(f"{kind}/", PrefixStore(f"{group_name}/", PrefixStore(group_name, store)))
    if backend == "gloo":
        return UpdateGroup(dist.ProcessGroupGloo(keys, rank, world_size, timeout=limit), store, group_name,
                           torch.device("cpu"))
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    with _raising_timeouts():
        group = dist.ProcessGroupNCCL(keys, rank, world_size, options)
    return UpdateGroup(group, store, group_name, torch.device(device))


@contextmanager
def _raising_timeouts() -> Iterator[None]:
    """NCCL groups that are made within raise where a member is lost; others end the process, and with it every request
    of the engine."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
