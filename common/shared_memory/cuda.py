"""GPU memory that another process of this host can map: CUDA IPC by the driver (ctypes), in torch's context.

torch has CUDA IPC only for whole tensors of its own, and as pickles.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

_ENABLE_PEER_ACCESS = 1


class DriverError(Exception):
    """An error code of the driver, as its text."""


class Handle(ctypes.Structure):
    """CUDA IPC handle of an allocation."""

    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class Allocation(NamedTuple):
    """Address and bytes of what one call of the driver has allocated, or mapped."""

    begin: int
    num_bytes: int


class CudaIpc:
    """Handles of one GPU's memory, and memory of other processes that this GPU reaches. Calls that map and unmap
    release the interpreter's lock. All raise DriverError."""

    def __init__(self, device: int):
        self._lib = ctypes.CDLL("libcuda.so.1")
        ordinal, self.context = ctypes.c_int(), ctypes.c_void_p()
        self.check(self._lib.cuInit(ctypes.c_uint(0)))
        self.check(self._lib.cuDeviceGet(ctypes.byref(ordinal), device))
        self.check(self._lib.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), ordinal))

    def allocation_of(self, address: int) -> Allocation:
        begin, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(size), ctypes.c_uint64(address))
        return Allocation(begin.value, size.value)

    def handle_of(self, begin: int) -> bytes:
        handle = Handle()
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(begin))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Maps an allocation of another process. Mapped again it has the same address, and is closed as often."""
        if len(handle) != ctypes.sizeof(Handle):
            raise DriverError("the handle is none of CUDA's")
        begin = ctypes.c_uint64()
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(begin), Handle.from_buffer_copy(handle),
                  ctypes.c_uint(_ENABLE_PEER_ACCESS))
        return begin.value

    def close(self, begin: int) -> None:
        self.call("cuIpcCloseMemHandle", ctypes.c_uint64(begin))

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver in this GPU's context."""
        self.check(self._lib.cuCtxSetCurrent(self.context))  # this thread may have none yet
        self.check(getattr(self._lib, name)(*arguments))

    def check(self, code: int) -> None:
        if code != 0:
            text = ctypes.c_char_p()
            self._lib.cuGetErrorString(code, ctypes.byref(text))
            raise DriverError((text.value or b"error %d" % code).decode())
