"""A process group of an engine's ranks: device collectives for the model, host collectives for decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist

from ...kernels.tuning.policy import is_batch_invariant
from .agreement import Sample

DistBackend = Literal["nccl", "gloo"]
"""The transport of tensors on GPUs; gloo copies them through host memory."""
_INLINE_BYTES = 4096
_HEADER_BYTES = 8
# The names since torch 2.13, which warns of the older ones.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class SmallAllReduce(Protocol):
    """Custom collectives over symmetric memory, for messages for which they are faster than NCCL.

    Each operation may be called for tensors that its ``can_`` method accepts.
    """

    def can_all_reduce(self, tensor: torch.Tensor) -> bool: ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums ``tensor`` over the ranks, in place."""

    def can_all_reduce_norm(self, rows: torch.Tensor) -> bool: ...

    def all_reduce_norm(self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
                        eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(norm(sum + residual) * weight, sum + residual)`` of ``rows`` [T, hidden]."""

    def warm_up(self, width: int, dtype: torch.dtype) -> None:
        """Compiles the kernels for rows of ``width`` values. All ranks call it."""

    def can_reduce_scatter(self, rows: torch.Tensor) -> bool: ...

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``TPGroup.reduce_scatter_rows``."""

    def can_all_gather(self, rows: torch.Tensor) -> bool: ...

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``TPGroup.all_gather_rows``."""

    def can_norm_gather(self, rows: torch.Tensor) -> bool:
        """Returns whether ``norm_gather`` and ``reduce_scatter_norm`` take ranks' own rows [n, hidden], n equal on
        all."""

    def norm_gather(self, rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor,
                    eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``norm(rows + residual) * weight`` of all ranks [ranks * n, hidden], and this rank's ``rows +
        residual``."""

    def reduce_scatter_norm(self, rows: torch.Tensor, addend: torch.Tensor | None, residual: torch.Tensor,
                            weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns ``(norm(own + residual) * weight, own + residual)``, where ``own`` is this rank's part of the sum of
        ``rows + addend`` [ranks * n, hidden]."""


class AsyncCollective:
    """The result of a collective that is in progress; what is enqueued meanwhile overlaps with it."""

    def __init__(self, rows: torch.Tensor, work: dist.Work | None):
        self._rows = rows
        self._work = work

    def rows(self) -> torch.Tensor:
        """Returns the rows, for what is enqueued from now on; on a CPU it waits for them."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._rows


class TPGroup:
    """Ranks that work in lockstep: every rank makes the same calls in the same order.

    A group of one rank never touches torch.distributed. Tensors on a GPU use NCCL; tensors on a CPU, bytes and integers
    gloo. ``symm_comm``, where it is set on all ranks, takes small messages.

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
        self._adds_in_order = size > 1 and is_batch_invariant()
        self.symm_comm: SmallAllReduce | None = None

    @contextmanager
    def without_symm_comm(self) -> Iterator[None]:
        """Disables ``symm_comm`` within the context, which all ranks enter together."""
        comm, self.symm_comm = self.symm_comm, None
        try:
            yield
        finally:
            self.symm_comm = comm

    @property
    def device_group(self) -> dist.ProcessGroup | None:
        """The NCCL group; None on a CPU, for one rank, and where tensors on a GPU go through host memory."""
        return self._device_group

    @property
    def through_host(self) -> bool:
        """True if tensors on a GPU go through host memory, which no CUDA graph can capture."""
        return self.size > 1 and self.device.type == "cuda" and self._device_group is None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums ``tensor`` over the ranks, in place; returns it."""
        if self.symm_comm is not None and self.symm_comm.can_all_reduce(tensor):
            self.symm_comm.all_reduce(tensor)
        elif self.through_host and tensor.is_cuda:
            tensor.copy_(self.all_reduce(tensor.cpu()))
        elif self._adds_in_order:
            self._add_in_order(tensor)
        elif self.size > 1:
            dist.all_reduce(tensor, group=self._group_of(tensor))
        return tensor

    def _add_in_order(self, tensor: torch.Tensor) -> None:
        """Sums ``tensor`` over the ranks, in place: in their order and in float32, as ``symm_comm`` does. A library's
        order depends on the size of the tensor. Each rank adds up a share: it moves as many bytes as a ring."""
        flat = tensor.flatten()
        share = -(-len(flat) // self.size)
        parts = torch.nn.functional.pad(flat, (0, share * self.size - len(flat))).view(self.size, share)
        ones = [1] * self.size
        total = torch.zeros(share, dtype=torch.float32, device=tensor.device)
        for part in self.all_to_all_rows(parts, ones, ones):
            total += part.float()
        tensor.copy_(self.all_gather_last_dim(total.to(tensor.dtype))[:len(flat)].view(tensor.shape))

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers ``[..., n]`` on each rank to ``[..., size * n]``, in rank order."""
        if self.size == 1:
            return tensor
        return torch.cat(tuple(self.all_gather_rows(tensor.contiguous()[None])), dim=-1)

    def all_gather_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gathers ``[n, a]`` on each rank, n equal on all, to ``[size * n, a]``, in rank order."""
        if self.size == 1:
            return tensor
        if self.symm_comm is not None and self.symm_comm.can_all_gather(tensor):
            return self.symm_comm.all_gather(tensor)
        if self.through_host and tensor.is_cuda:
            return self.all_gather_rows(tensor.cpu()).to(tensor.device)
        rows = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        _all_gather(rows, tensor.contiguous(), group=self._group_of(tensor))
        return rows

    def reduce_scatter_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums ``[size * n, a]`` over the ranks, and returns this rank's ``[n, a]`` of the sum."""
        if self.size == 1:
            return tensor
        if self.symm_comm is not None and self.symm_comm.can_reduce_scatter(tensor):
            return self.symm_comm.reduce_scatter(tensor)
        if self.through_host and tensor.is_cuda:
            return self.reduce_scatter_rows(tensor.cpu()).to(tensor.device)
        rows = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        _reduce_scatter(rows, tensor.contiguous(), group=self._group_of(tensor))
        return rows

    def start_all_gather(self, tensor: torch.Tensor) -> AsyncCollective:
        """Starts ``all_gather_rows`` without waiting for it."""
        if self.size == 1:
            return AsyncCollective(tensor, None)
        if self.through_host:
            return AsyncCollective(self.all_gather_rows(tensor), None)
        rows = tensor.new_empty(self.size * tensor.shape[0], *tensor.shape[1:])
        work = _all_gather(rows, tensor.contiguous(), group=self._group_of(tensor), async_op=True)
        return AsyncCollective(rows, work)

    def start_reduce_scatter(self, tensor: torch.Tensor) -> AsyncCollective:
        """Starts ``reduce_scatter_rows`` without waiting for it."""
        if self.size == 1:
            return AsyncCollective(tensor, None)
        if self.through_host:
            return AsyncCollective(self.reduce_scatter_rows(tensor), None)
        rows = tensor.new_empty(tensor.shape[0] // self.size, *tensor.shape[1:])
        work = _reduce_scatter(rows, tensor.contiguous(), group=self._group_of(tensor), async_op=True)
        return AsyncCollective(rows, work)

    def all_to_all_rows(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Sends rows ``[sum(sent), ...]``, the first ``sent[0]`` to rank 0 and so on, and returns the received ones
        ``[sum(received), ...]``, those of rank 0 first. ``received[r]`` rows come from rank r."""
        if self.size == 1:
            return rows
        if self.through_host and rows.is_cuda:
            return self.all_to_all_rows(rows.cpu(), sent, received).to(rows.device)
        output = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=self._group_of(rows))
        return output

    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> torch.Tensor:
        """Overwrites ``tensor`` with rank ``src``'s, in place; returns it."""
        if self.through_host and tensor.is_cuda:
            tensor.copy_(self.broadcast(tensor.cpu(), src))
        elif self.size > 1:
            dist.broadcast(tensor, group_src=src, group=self._group_of(tensor))
        return tensor

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Returns rank 0's ``data`` on every rank (the others pass None). Up to 4 KiB take one collective, more two."""
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
        """Returns the element-wise minimum over the ranks of an int64 array of equal shape on each."""
        if self.size == 1:
            return values
        reduced = torch.from_numpy(values.astype(np.int64))
        dist.all_reduce(reduced, op=dist.ReduceOp.MIN, group=self._host_group)
        return reduced.numpy()

    def all_true(self, condition: bool) -> bool:
        """Returns whether ``condition`` is true on every rank."""
        return bool(self.min_reduce(np.array([condition], np.int64))[0])

    def min_by_key(self, topic: str, keys: Sequence[int], sample: Sample, unknown: Sequence[int]) -> np.ndarray:
        """Implements RankAgreement by a collective: the minimum of this moment, so that nothing is unknown."""
        rows = sample()
        return self.min_reduce(np.array([rows[key] for key in keys], np.int64).reshape(len(keys), len(unknown)))

    def gather_ints(self, values: np.ndarray) -> np.ndarray:
        """Gathers ``[n]`` integers on each rank to ``[size, n]`` int64, in rank order."""
        mine = torch.from_numpy(values.astype(np.int64))
        return self._gather_host(mine).view(self.size, -1).numpy()

    def _gather_host(self, mine: torch.Tensor) -> torch.Tensor:
        if self.size == 1:
            return mine
        gathered = mine.new_empty(self.size * mine.shape[0])
        _all_gather(gathered, mine, group=self._host_group)
        return gathered

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self._host_group)

    def close(self) -> None:
        """Leaves torch.distributed, and with it every group of this process."""
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()

    def _group_of(self, tensor: torch.Tensor) -> dist.ProcessGroup | None:
        return self._device_group if tensor.is_cuda else self._host_group

    def __repr__(self) -> str:
        return f"TPGroup(rank {self.rank} of {self.size} on {self.device})"


def init_tp(rank: int, size: int, init_method: str, device: torch.device | str, timeout: float = 600.0,
            backend: DistBackend = "nccl") -> TPGroup:
    """Joins the group as ``rank``; waits for the others up to ``timeout`` seconds.

    ``init_method`` is torch.distributed's (``tcp://host:port`` or ``file:///path``). One process joins one group.
    ``backend`` is the transport of tensors on GPUs; on a CPU it is ignored.
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
