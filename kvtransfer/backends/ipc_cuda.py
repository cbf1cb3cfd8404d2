"""GPU memory by CUDA IPC, for the ipc backend.

The driver is called by itself (ctypes): torch has these functions for whole tensors of its own only, and a KV pool is
one part of an allocation, named by its address. A handle leads to the allocation that an address lies in; the offset
travels beside it. The same memory opened twice is one mapping, counted by the driver.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import msgspec
import numpy as np
import torch

from ...common.api.errors import ConfigError, TransferFailed
from ...kernels import _triton
from ...kernels.copy_blocks import copy_blocks
from .base import Region, WriteState

logger = logging.getLogger(__name__)

_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class _Exported(msgspec.Struct):
    handle: bytes
    offset: int


class CudaMemory:
    """Pools on one GPU. Copies run on a stream of their own, before other work that waits: they are short, and
    requests wait for them."""

    def __init__(self, device: int):
        if not _triton.AVAILABLE:
            raise ConfigError("--disaggregation-transfer-backend ipc needs the triton package on GPUs.")
        self._device = torch.device("cuda", device)
        self._driver = _Driver(device)
        self._stream = torch.cuda.Stream(self._device, priority=-1)
        self._mapped: dict[int, int | None] = {}  # a region's address, and where its allocation begins; None: our own

    def export(self, region: Region) -> bytes:
        try:
            begin = self._driver.allocation_of(region.address)
            handle = self._driver.handle_of(begin)
        except _DriverError as error:
            raise ConfigError(f"The KV pool cannot be shared with other processes ({error}); "
                              f"--disaggregation-transfer-backend ipc does not work with expandable_segments in "
                              f"PYTORCH_CUDA_ALLOC_CONF.") from None
        return msgspec.msgpack.encode(_Exported(handle, region.address - begin))

    def attach(self, handle: bytes, region: Region, *, ours: bool) -> int:
        if ours:  # which the driver refuses to open
            if region.device != self._device.index:
                raise TransferFailed("two GPUs of one process")
            self._mapped[region.address] = None
            return region.address
        try:
            exported = msgspec.msgpack.decode(handle, type=_Exported)
            begin = self._driver.open(exported.handle)
        except (_DriverError, msgspec.MsgspecError) as error:
            raise TransferFailed(f"the peer's GPU memory cannot be mapped ({error}): both GPUs must be visible to both "
                                 f"servers and reach each other, or use --disaggregation-transfer-backend nixl.",
                                 cause="mismatch") from None
        address = begin + exported.offset
        self._mapped[address] = begin
        return address

    def detach(self, address: int) -> None:
        begin = self._mapped[address]
        try:
            if begin is not None:
                self._driver.close(begin)
        except _DriverError as error:
            logger.warning("GPU memory of a peer stays mapped: %s", error)

    def prepare(self, block_bytes: int) -> None:
        """Compile the kernel now, which the first prompt would wait for."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            copy_blocks(0, 0, torch.empty((2, 0), dtype=torch.int64, device=self._device), block_bytes)

    def copy(self, src: int, dst: int, src_ids: np.ndarray, dst_ids: np.ndarray, block_bytes: int) -> _CudaCopy:
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                staged = torch.empty((2, len(src_ids)), dtype=torch.int64, pin_memory=True)
                np.stack((src_ids, dst_ids), out=staged.numpy())
                ids = staged.to(self._device, non_blocking=True)
                copy_blocks(src, dst, ids, block_bytes)
                done = torch.cuda.Event()
                done.record()
        except RuntimeError as error:  # torch's and Triton's
            raise TransferFailed(f"the GPU copies nothing: {error}") from error
        return _CudaCopy(ids, done)

    def settle(self) -> None:
        try:
            self._stream.synchronize()
        except RuntimeError as error:  # torch's of a kernel that failed; what it has not written, it will not write
            logger.warning("A copy to a peer's GPU memory failed: %s", error)


class _CudaCopy:
    def __init__(self, ids: torch.Tensor, done: torch.cuda.Event):
        self._ids, self._done = ids, done

    def poll(self) -> WriteState:
        try:
            return WriteState.DONE if self._done.query() else WriteState.PENDING
        except RuntimeError as error:  # as in settle
            logger.warning("A copy to a peer's GPU memory failed: %s", error)
            return WriteState.FAILED


class _DriverError(Exception):
    """What the driver says."""


class _Driver:
    """The five functions that we need of libcuda, in the context that torch uses on a GPU."""

    def __init__(self, device: int):
        self._lib = ctypes.CDLL("libcuda.so.1")
        ordinal, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self._lib.cuDeviceGet(ctypes.byref(ordinal), device))
        self._check(self._lib.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), ordinal))

    def allocation_of(self, address: int) -> int:
        begin, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address))
        return begin.value

    def handle_of(self, begin: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(begin))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        if len(handle) != ctypes.sizeof(_Handle):
            raise _DriverError("the handle is none of CUDA's")
        begin = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(begin), _Handle.from_buffer_copy(handle),
                   ctypes.c_uint(_ENABLE_PEER_ACCESS))
        return begin.value

    def close(self, begin: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(begin))

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(self._lib.cuCtxSetCurrent(self._context))  # of this thread, which may have none yet
        self._check(getattr(self._lib, name)(*arguments))

    def _check(self, code: int) -> None:
        if code != 0:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(code, ctypes.byref(text))
            raise _DriverError((text.value or b"error %d" % code).decode())
