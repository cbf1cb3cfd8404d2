"""Tensors as handles of the memory that has them: GPU memory by CUDA IPC, host memory as anonymous files.

A description is JSON, names memory by numbers alone and runs nothing: unlike a pickle, it can make a server read
memory that the sender has, and nothing else.
"""

from __future__ import annotations

import base64
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np
import torch

from ..api.errors import InvalidRequest
from ..api.unreadable import UNREADABLE
from ..shared_memory.cuda import CudaIpc, DriverError
from ..shared_memory.host import HostHandle, handle_of, map_handle, shared_bytes
from .pushed import NamedTensor, dtype_of, num_bytes

_PARAM = "serialized_named_tensors"
_ALIGNMENT = 64
"""Bytes to which tensors in host memory are aligned."""
_MAX_BYTES = 1 << 60


class HostFile(msgspec.Struct, frozen=True, tag="host"):
    """An anonymous file of a process of this host, which it has open as ``fd``."""

    pid: int
    fd: int
    inode: int


class GPUAllocation(msgspec.Struct, frozen=True, tag="cuda"):
    """What one call of the driver has allocated on the GPU with the UUID ``device``: its CUDA IPC handle and size."""

    device: str
    handle: bytes
    num_bytes: int


class TensorPlace(msgspec.Struct, frozen=True):
    """A contiguous tensor ``offset`` bytes behind the beginning of ``memory[index]``."""

    name: str
    dtype: str
    shape: list[int]
    index: int
    offset: int


class TensorHandles(msgspec.Struct, frozen=True):
    """Tensors, and the memory that they are in."""

    memory: list[HostFile | GPUAllocation]
    tensors: list[TensorPlace]


@dataclass(frozen=True)
class SharedTensors:
    """Tensors that processes of this host may map while this object lives. ``entry`` describes them, as a value of
    ``serialized_named_tensors`` with the ``load_format`` ``handles``."""

    entry: str
    kept: Sequence[Any]


def share_tensors(tensors: Mapping[str, torch.Tensor] | Iterable[NamedTensor]) -> SharedTensors:
    """Describes named tensors to servers of this host. Those on a GPU stay where they are, those in host memory are
    copied once. Keep the object, and the values on a GPU as they are, until the server has answered.

    Raises RuntimeError for GPU memory that CUDA cannot share (``expandable_segments`` of PYTORCH_CUDA_ALLOC_CONF).
    """
    named = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    kept = [(name, tensor.detach().contiguous()) for name, tensor in named]
    on_host = [(name, tensor) for name, tensor in kept if not tensor.is_cuda]
    on_gpu = [(name, tensor) for name, tensor in kept if tensor.is_cuda]
    memory, places, held = _share_gpu(on_gpu)
    if on_host:
        block, placed = _share_host(on_host, len(memory))
        handle = handle_of(block.ctypes.data, len(block))
        assert handle is not None
        memory.append(HostFile(handle.pid, handle.fd, handle.inode))
        places += placed
        held.append(block)
    entry = base64.b64encode(msgspec.json.encode(TensorHandles(memory, places))).decode()
    return SharedTensors(entry, held)


def _share_host(tensors: Sequence[NamedTensor], index: int) -> tuple[np.ndarray, list[TensorPlace]]:
    """Copies tensors into one block."""
    places, end = [], 0
    for name, tensor in tensors:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(_place(name, tensor, index, start))
        end = start + tensor.nbytes
    block = shared_bytes(max(end, 1))
    whole = torch.from_numpy(block)
    for (_, tensor), place in zip(tensors, places):
        whole[place.offset:place.offset + tensor.nbytes].copy_(tensor.flatten().view(torch.uint8))
    return block, places


def _share_gpu(tensors: Sequence[NamedTensor]) -> tuple[list[HostFile | GPUAllocation], list[TensorPlace], list[Any]]:
    """Exports the allocations that tensors are in, and waits for what computes them."""
    indices: dict[int, int] = {}  # by the beginning of an allocation
    memory: list[HostFile | GPUAllocation] = []
    places = []
    for device in sorted({tensor.get_device() for _, tensor in tensors}):
        torch.cuda.synchronize(device)
    for name, tensor in tensors:
        device = tensor.get_device()
        try:
            begin, size = _ipc(device).allocation_of(tensor.data_ptr())
            if begin not in indices:
                indices[begin] = len(memory)
                memory.append(GPUAllocation(_uuid(device), _ipc(device).handle_of(begin), size))
        except DriverError as error:
            raise RuntimeError(f"CUDA cannot share the memory of {name} ({error}): leave expandable_segments out of "
                               "PYTORCH_CUDA_ALLOC_CONF.") from None
        places.append(_place(name, tensor, indices[begin], tensor.data_ptr() - begin))
    return memory, places, [tensor for _, tensor in tensors]


def _place(name: str, tensor: torch.Tensor, index: int, offset: int) -> TensorPlace:
    return TensorPlace(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), index, offset)


def map_tensors(content: bytes, device: torch.device) -> list[NamedTensor]:
    """Maps the tensors of a description, for a rank on ``device``: they are memory of the sender, mapped as long as
    they are referenced. Raises InvalidRequest for a description that does not fit the memory."""
    try:
        found = msgspec.json.decode(content, type=TensorHandles)
    except UNREADABLE as error:
        raise InvalidRequest(f"{_PARAM} has an entry that is no description of handles ({error}): send "
                             "baton.share_tensors(tensors).entry.", param=_PARAM) from None
    ends = [0] * len(found.memory)
    types = [dtype_of(place.dtype) for place in found.tensors]
    for place, dtype in zip(found.tensors, types):
        size = num_bytes(dtype, place.shape)
        if not (0 <= place.index < len(ends) and all(0 <= each <= _MAX_BYTES for each in place.shape)
                and 0 <= place.offset <= _MAX_BYTES - size and place.offset % dtype.itemsize == 0):
            raise InvalidRequest(f"{_PARAM} has no tensor {place.name} of shape {place.shape} at byte {place.offset} "
                                 f"of memory {place.index}.", param=_PARAM)
        ends[place.index] = max(ends[place.index], place.offset + size)
    blocks = [_map_host(memory, end) if isinstance(memory, HostFile) else _map_gpu(memory, end, device)
              for memory, end in zip(found.memory, ends)]
    return [(place.name, blocks[place.index][place.offset:][:num_bytes(dtype, place.shape)].view(dtype).view(
        place.shape)) for place, dtype in zip(found.tensors, types)]


def _map_host(memory: HostFile, size: int) -> torch.Tensor:
    try:
        return torch.from_numpy(map_handle(HostHandle(memory.pid, memory.fd, memory.inode, 0), size))
    except (OSError, OverflowError, ValueError) as error:
        raise InvalidRequest(f"{_PARAM} names host memory of process {memory.pid} that cannot be mapped ({error}): "
                             "trainer and server must run on one host, as one user and in one PID namespace, and the "
                             "trainer keep what share_tensors returned until it has the answer.",
                             param=_PARAM) from None


def _map_gpu(memory: GPUAllocation, size: int, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        raise InvalidRequest(f"{_PARAM} names memory of the GPU {memory.device}, and this server runs on a CPU: send "
                             "tensors in host memory.", param=_PARAM)
    try:
        mapped = _Mapped(_ipc(device.index), memory)
    except DriverError as error:
        raise InvalidRequest(f"{_PARAM} names memory of the GPU {memory.device} that cannot be mapped ({error}): the "
                             "server must see this GPU, and the trainer keep the tensors until it has the answer.",
                             param=_PARAM) from None
    if size > mapped.num_bytes:
        raise InvalidRequest(f"{_PARAM} names {size} bytes of GPU memory that has {mapped.num_bytes}.", param=_PARAM)
    return torch.as_tensor(mapped, device=device)


class _Mapped:
    """An allocation of another process, mapped as long as this object is referenced: a tensor of it does."""

    def __init__(self, ipc: CudaIpc, memory: GPUAllocation):
        begin = ipc.open(memory.handle)
        weakref.finalize(self, ipc.close, begin).atexit = False
        self.num_bytes = memory.num_bytes
        with suppress(DriverError):  # of a driver that does not tell the size of mapped memory
            self.num_bytes = min(self.num_bytes, ipc.allocation_of(begin).num_bytes)
        self.__cuda_array_interface__ = {"shape": (self.num_bytes,), "typestr": "|u1", "version": 3,
                                         "data": (begin, False), "strides": None}


@cache
def _ipc(device: int) -> CudaIpc:
    return CudaIpc(device)


def _uuid(device: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
