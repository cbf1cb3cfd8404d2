"""Bindings to the CUDA driver (ctypes), in the context that torch uses on a GPU.

torch's and Triton's launches release the interpreter's lock: in a server whose scheduler computes meanwhile, each of
them may return milliseconds later. Calls that return at once hold the lock here (``_quick``); those that map and unmap
memory release it.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch

from ...common.shared_memory.cuda import CudaIpc, DriverError

_DISABLE_TIMING = 2
_NOT_READY = 600
_PORTABLE, _MAPPED = 1, 2


class Staging(NamedTuple):
    """Buffers of equal size: ``host`` in page-locked memory and ``ids`` on the GPU, at ``address``. Both are freed with
    this object."""

    host: np.ndarray
    ids: torch.Tensor | None
    address: int


class Driver:
    """Driver functions for one GPU and a stream of our own that has priority over other work.

    Methods for the stream and its events must be called after ``enter``, in the same thread; all but ``synchronize``
    return at once.
    """

    def __init__(self, device: int):
        self.ipc = CudaIpc(device)
        self._call, self._check = self.ipc.call, self.ipc.check
        self._quick = ctypes.PyDLL("libcuda.so.1")
        self._torch_stream = torch.cuda.Stream(device, priority=-1)
        self._stream = ctypes.c_void_p(self._torch_stream.cuda_stream)

    def map_host(self, address: int, num_bytes: int) -> int:
        """Maps host memory and returns its address on the GPU."""
        if not hasattr(self._quick, "cuStreamWriteValue64_v2"):
            raise DriverError("the driver has no cuStreamWriteValue64")
        device_address = ctypes.c_uint64()
        self._call("cuMemHostRegister_v2", ctypes.c_void_p(address), ctypes.c_size_t(num_bytes),
                   ctypes.c_uint(_PORTABLE | _MAPPED))
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(device_address), ctypes.c_void_p(address),
                   ctypes.c_uint(0))
        return device_address.value

    def unmap_host(self, address: int) -> None:
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    # -- the stream -----------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Makes our GPU's context current for the calls that follow in this thread."""
        self._check(self._quick.cuCtxSetCurrent(self.ipc.context))

    def new_event(self) -> ctypes.c_void_p:
        event = ctypes.c_void_p()
        self._check(self._quick.cuEventCreate(ctypes.byref(event), ctypes.c_uint(_DISABLE_TIMING)))
        return event

    def record(self, event: ctypes.c_void_p) -> None:
        self._check(self._quick.cuEventRecord(event, self._stream))

    def has_happened(self, event: ctypes.c_void_p) -> bool:
        """Returns whether the event has happened. Raises DriverError also for work that failed before it."""
        if (code := self._quick.cuEventQuery(event)) != _NOT_READY:
            self._check(code)
            return True
        return False

    def copy(self, dst: int, src: int, num_bytes: int) -> None:
        """Starts a copy between any two of: this GPU, a mapped GPU, page-locked host memory."""
        self._check(self._quick.cuMemcpyAsync(ctypes.c_uint64(dst), ctypes.c_uint64(src), ctypes.c_size_t(num_bytes),
                                              self._stream))

    def launch(self, kernel: Any, programs: int, parameters: Any) -> None:
        """Launches ``kernel``, which Triton has compiled and loaded; ``parameters`` is an array of pointers to its
        parameters."""
        self._check(self._quick.cuLaunchKernel(
            ctypes.c_void_p(kernel.function), programs, 1, 1, kernel.metadata.num_warps * 32, 1, 1,
            kernel.metadata.shared, self._stream, parameters, None))

    def write_value(self, address: int, value: int) -> None:
        """Writes 64 bits once the stream's work so far is complete and visible."""
        self._check(self._quick.cuStreamWriteValue64_v2(self._stream, ctypes.c_uint64(address), ctypes.c_uint64(value),
                                                        ctypes.c_uint(0)))

    def stage(self, count: int) -> Staging:
        """Allocates ``count`` integers of 64 bits on both sides, on our stream: on another, earlier users of the memory
        might still run."""
        with torch.cuda.stream(self._torch_stream):
            ids = torch.empty(count, dtype=torch.int64, device=self._torch_stream.device)
            return Staging(torch.empty(count, dtype=torch.int64, pin_memory=True).numpy(), ids, ids.data_ptr())

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self._stream)
