"""A group of an engine's ranks: device collectives for the model, host ones for decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

DistBackend = Literal["nccl", "gloo"]
"""What tensors on GPUs travel by; with gloo through host memory."""
_INLINE_BYTES = 4096
_HEADER_BYTES = 8
# The names since torch 2.13, which warns of the older ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SmallAllReduce(Protocol):
    """A quicker way for some sums over a group."""

    def takes(self, tensor: torch.Tensor) -> bool: ...

    def sum(self, tensor: torch.Tensor) -> None:
        """In place; ``takes`` took the tensor."""

    def takes_rows(self, rows: torch.Tensor) -> bool: ...

    def sum_normed(self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
                   eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(sum + residual) * weight, sum + residual)`` of ``rows`` [T, hidden], which ``takes_rows`` took."""

    def warm_up(self, width: int, dtype: torch.dtype) -> None:
        """Before rows of so many values are summed and normed. All ranks call it."""

    def scatters(self, rows: torch.Tensor) -> bool: ...

    def scatter_sum(self, rows: torch.Tensor) -> torch.Tensor:
        """``TPGroup.reduce_scatter_rows`` of what ``scatters`` took."""

    def gathers(self, rows: torch.Tensor) -> bool: ...

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """``TPGroup.all_gather_rows`` of what ``gathers`` took."""

    def meets(self, rows: torch.Tensor) -> bool:
        """Whether the norms of ranks' own rows [n, hidden], n equal on all, can meet in one kernel and part in one."""

    def gather_normed(self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
                      eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(rows + residual) * weight`` of all ranks [ranks * n, hidden], this rank's ``rows + residual)``."""

    def scatter_normed(self, rows: torch.Tensor, more: torch.Tensor | None, residual: torch.Tensor,
                       weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """``(norm(own + residual) * weight, own + residual)`` of this rank's part ``own`` of the sum of ``rows + more``
        [ranks * n, hidden]."""


class Arriving:
    """Rows that a group's collective is bringing; what is enqueued meanwhile runs beside it."""

    def __init__(self, rows: torch.Tensor, work: dist.Work | None):
        self._rows = rows
        self._work = work

    def rows(self) -> torch.Tensor:
        """For what is enqueued from now on; a CPU waits here."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._rows


class TPGroup:
    """Ranks that work in lockstep: every rank makes the same calls in the same order.

    A group of one rank never touches torch.distributed. Tensors on a GPU travel over NCCL; tensors on a CPU,
    bytes and integers over gloo. ``peers``, where it is set on all ranks, takes small sums.

    Without a ``device_group`` tensors on a GPU are copied to the host, go over gloo and are copied back, and the host
    waits for each: slow, but ranks may then share a GPU, which NCCL refuses.
    """

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu", *,
                 host_group: dist.ProcessGroup | None = None, device_group: dist.ProcessGroup | None = None):
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._device_group = device_group
        self._host_group = host_group
        self.peers: SmallAllReduce | None = None

    @contextmanager
    def without_peers(self) -> Iterator[None]:
        """Nothing goes through ``peers`` meanwhile. All ranks do so together."""
        peers, self.peers = self.peers, None
        try:
            yield
        finally:
            self.peers = peers

    @property
    def device_group(self) -> dist.ProcessGroup | None:
        """What tensors on a GPU travel by; None on a CPU, of one rank, and where they go through host memory."""
        return self._device_group

    @property
    def through_host(self) -> bool:
        """Whether tensors on a GPU go through host memory, which no CUDA graph can hold."""
        return self.size > 1 and self.device.type == "cuda" and self._device_group is None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place; returns ``tensor``."""
        if self.peers is not None and self.peers.takes(tensor):
            self.peers.sum(tensor)
        elif self.through_host and tensor.is_cuda:
            tensor.copy_(self.all_reduce(tensor.cpu()))
        elif self.size > 1:
            dist.all_reduce(tensor, group=self._group_of(tensor))
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[..., n]`` on each rank to ``[..., size * n]``, in rank order."""
        if self.size == 1:
            return tensor
        return torch.cat(tuple(self.all_gather_rows(tensor.contiguous()[None])), dim=-1)

    def all_gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[n, a]`` on each rank, n equal on all, to ``[size * n, a]``, in rank order."""
        if self.size == 1:
            return tensor
        if self.peers is not None and self.peers.gathers(tensor):
            return self.peers.gather(tensor)
        if self.through_host and tensor.is_cuda:
            return self.all_gather_rows(tensor.cpu()).to(tensor.device)
        rows = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        _all_gather(rows, tensor.contiguous(), group=self._group_of(tensor))
        return rows

    def reduce_scatter_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[size * n, a]`` on each rank, summed over the ranks; of the sum each gets its ``[n, a]``."""
        if self.size == 1:
            return tensor
        if self.peers is not None and self.peers.scatters(tensor):
            return self.peers.scatter_sum(tensor)
        if self.through_host and tensor.is_cuda:
            return self.reduce_scatter_rows(tensor.cpu()).to(tensor.device)
        rows = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        _reduce_scatter(rows, tensor.contiguous(), group=self._group_of(tensor))
        return rows

    def start_gather(self, tensor: torch.Tensor) -> Arriving:
        """``all_gather_rows``, which returns before it is done."""
        if self.size == 1:
            return Arriving(tensor, None)
        if self.through_host:
            return Arriving(self.all_gather_rows(tensor), None)
        rows = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        return Arriving(rows, _all_gather(rows, tensor.contiguous(), group=self._group_of(tensor), async_op=True))

    def start_scatter(self, tensor: torch.Tensor) -> Arriving:
        """``reduce_scatter_rows``, which returns before it is done."""
        if self.size == 1:
            return Arriving(tensor, None)
        if self.through_host:
            return Arriving(self.reduce_scatter_rows(tensor), None)
        rows = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        return Arriving(rows, _reduce_scatter(rows, tensor.contiguous(), group=self._group_of(tensor), async_op=True))

    def all_to_all_rows(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Rows ``[sum(sent), ...]``, the first ``sent[0]`` for rank 0 and so on, to ``[sum(received), ...]``, those of
        rank 0 first. ``received[r]`` is what rank r has sent here."""
        if self.size == 1:
            return rows
        if self.through_host and rows.is_cuda:
            return self.all_to_all_rows(rows.cpu(), sent, received).to(rows.device)
        taken = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(taken, rows.contiguous(), received, sent, group=self._group_of(rows))
        return taken

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrite ``tensor`` with rank ``src``'s, in place; returns it."""
        if self.through_host and tensor.is_cuda:
            tensor.copy_(self.broadcast(tensor.cpu(), src))
        elif self.size > 1:
            dist.broadcast(tensor, group_src=src, group=self._group_of(tensor))
        return tensor

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's ``data`` on every rank (the others pass None). Up to 4 KiB take one collective, more take two."""
        if self.size == 1:
            assert data is not None
            return data
        first = torch.zeros(_HEADER_BYTES + _INLINE_BYTES, dtype=torch.uint8)
        if self.rank == 0:
            assert data is not None
            header = len(data).to_bytes(_HEADER_BYTES, "little")
            inline = header + data[:_INLINE_BYTES]
            first[:len(inline)] = torch.frombuffer(bytearray(inline), dtype=torch.uint8)
        dist.broadcast(first, group_src=0, group=self._host_group)
        received = first.numpy().tobytes()
        length = int.from_bytes(received[:_HEADER_BYTES], "little")
        head = received[_HEADER_BYTES:_HEADER_BYTES + min(length, _INLINE_BYTES)]
        if length <= _INLINE_BYTES:
            return head
        rest = torch.empty(length - _INLINE_BYTES, dtype=torch.uint8)
        if self.rank == 0:
            assert data is not None
            rest = torch.frombuffer(bytearray(data[_INLINE_BYTES:]), dtype=torch.uint8)
        dist.broadcast(rest, group_src=0, group=self._host_group)
        return head + rest.numpy().tobytes()

    def min_reduce(self, values: np.ndarray) -> np.ndarray:
        """Element-wise minimum over the ranks of an int64 array of equal shape on each."""
        if self.size == 1:
            return values
        reduced = torch.from_numpy(values.astype(np.int64))
        dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=self._host_group)
        return reduced.numpy()

    def all_true(self, fine: bool) -> bool:
        """Whether it is so on every rank."""
        return bool(self.min_reduce(np.array([fine], np.int64))[0])

    def least(self, topic: str, keys: Sequence[int], values: np.ndarray, unknown: Sequence[int]) -> np.ndarray:
        """Agreeing's: of right now, so that nothing is unknown."""
        return self.min_reduce(values)

    def gather_ints(self, values: np.ndarray) -> np.ndarray:
        """``[n]`` integers on each rank to ``[size, n]`` int64, in rank order."""
        mine = torch.from_numpy(values.astype(np.int64))
        return self._gather_host(mine).view(self.size, -1).numpy()

    def _gather_host(self, mine: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return mine
        told = mine.new_empty(self.size * mine.shape[0])
        _all_gather(told, mine, group=self._host_group)
        return told

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self._host_group)

    def close(self) -> None:
        """Leave torch.distributed, and with it every group of this process."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        return self._device_group if tensor.is_cuda else self._host_group

    def __repr__(self) -> str:
        return f"TPGroup(rank {self.rank} of {self.size} on {self.device})"


def init_tp(rank: int, size: int, init_method: str, device: torch.device | str, timeout: float = 600.0,
            backend: DistBackend = "nccl") -> TPGroup:
    """Join the group as ``rank``; waits for the others up to ``timeout`` seconds.

    ``init_method`` is torch.distributed's (``tcp://host:port`` or ``file:///path``). One process joins one group.
    ``backend``: of tensors on GPUs; on a CPU it says nothing.
    """
    group = TPGroup(rank, size, device)
    if group.device.type == "cuda":
        torch.cuda.set_device(group.device)  # Triton launches on the current device, whatever its arguments' is
    if size == 1:
        return group
    limit = timedelta(seconds=timeout)
    if group.device.type == "cuda" and backend == "nccl":
        dist.init_process_group("nccl", init_method=init_method, rank=rank, world_size=size, timeout=limit,
                                device_id=group.device)
        group._device_group = dist.group.WORLD
        group._host_group = dist.new_group(backend="gloo", timeout=limit)
    else:
        dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=size, timeout=limit)
        group._host_group = dist.group.WORLD
    return group
