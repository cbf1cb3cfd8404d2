"""GPU memory by CUDA IPC, for the ipc backend.

A handle identifies the allocation that an address is in; the offset is sent with it. The same memory opened twice is
one mapping, counted by the driver.

Long runs of neighbouring blocks are left to the copy engines, which fill the link and use no SMs, but take microseconds
for each run; a kernel copies scattered blocks. The host spends little time on a write in both cases: the buffers of a
copy (its ids on both sides, an event, the parameters of a launch) are reused.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from ...common.api.errors import ConfigError, TransferFailed
from ...common.api.unreadable import UNREADABLE
from ...common.shared_memory.cuda import DriverError
from ...kernels import _triton
from ...kernels.comm.copy_blocks import BlockShape, compiled
from .base import Region, WriteState
from .cuda_driver import Driver, Staging

logger = logging.getLogger(__name__)

MIN_RUN_BYTES = 32 << 20
"""Mean length in bytes from which blocks are copied in runs. A run costs a copy engine 6 us in addition to its bytes:
between two H200s runs of 4 MiB reach 225 GB/s, of 16 MiB 319, a single run 389; the kernel reaches 348."""

Run = tuple[int, int]
"""Index of the first block, and number of blocks."""


class _Exported(msgspec.Struct):
    handle: bytes
    offset: int


class CudaMemory:
    """Pools on one GPU. Copies run on a stream of their own with priority over other work: they are short, and requests
    wait for them."""

    def __init__(self, device: int):
        if not _triton.AVAILABLE:
            raise ConfigError("--disaggregation-transfer-backend ipc needs the triton package on GPUs.")
        self._device = device
        self._driver = Driver(device)
        self._mapped: dict[int, int | None] = {}  # allocations of mapped regions; None: this process's
        self._running: set[_CudaCopy] = set()
        self._idle: list[_Slot] = []

    def export(self, region: Region) -> bytes:
        try:
            begin = self._driver.ipc.allocation_of(region.address).begin
            handle = self._driver.ipc.handle_of(begin)
        except DriverError as error:
            raise ConfigError(f"The KV pool cannot be shared with other processes ({error}); "
                              f"--disaggregation-transfer-backend ipc does not work with expandable_segments in "
                              f"PYTORCH_CUDA_ALLOC_CONF.") from None
        return msgspec.msgpack.encode(_Exported(handle, region.address - begin))

    def attach(self, handle: bytes, region: Region, *, ours: bool) -> int:
        if ours:  # the driver refuses to open handles of its own process
            if region.device != self._device:
                raise TransferFailed("two GPUs of one process")
            self._mapped[region.address] = None
            return region.address
        try:
            exported = msgspec.msgpack.decode(handle, type=_Exported)
            begin = self._driver.ipc.open(exported.handle)
        except (DriverError, *UNREADABLE) as error:
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
                self._driver.ipc.close(begin)
        except DriverError as error:
            logger.warning("GPU memory of a peer stays mapped: %s", error)

    def map_flags(self, flags: np.ndarray) -> int:
        try:
            return self._driver.map_host(flags.ctypes.data, flags.nbytes)
        except DriverError as error:
            raise TransferFailed(f"the GPU does not reach host memory of the peer: {error}") from None

    def unmap_flags(self, flags: np.ndarray) -> None:
        try:
            self._driver.unmap_host(flags.ctypes.data)
        except DriverError as error:
            logger.warning("Host memory of a peer stays mapped: %s", error)

    def write_flag(self, address: int, value: int, after: Sequence[object]) -> None:
        """Writes the value in the stream's order, which is enough."""
        try:
            self._driver.enter()
            self._driver.write_value(address, value)
        except DriverError as error:
            raise TransferFailed(f"the GPU writes no value: {error}") from error

    def prepare(self, block_bytes: int) -> None:
        """Compiles the kernel, which the first prompt would wait for, and allocates slots for a few copies."""
        compiled(BlockShape.of(block_bytes), self._device)
        self._driver.enter()
        while len(self._idle) < _NUM_SLOTS:
            self._idle.append(_Slot(self._driver))

    def copy(self, src: int, dst: int, src_ids: np.ndarray, dst_ids: np.ndarray, block_bytes: int) -> _CudaCopy:
        try:
            self._driver.enter()
            slot = self._idle.pop() if self._idle else _Slot(self._driver)
            copy = _CudaCopy(self, slot)
            self._running.add(copy)
            runs = find_runs(src_ids, dst_ids, max(1, len(src_ids) * block_bytes // MIN_RUN_BYTES))
            if runs is None:
                self._scatter(slot, src, dst, src_ids, dst_ids, block_bytes)
            else:
                self._copy_runs(runs, src, dst, src_ids, dst_ids, block_bytes)
            self._driver.record(slot.done)
        except (DriverError, RuntimeError) as error:  # the driver's; torch's and Triton's
            self.wait_for_copies()  # a part of the copy may have been started
            raise TransferFailed(f"the GPU copies nothing: {error}") from error
        return copy

    def wait_for_copies(self) -> None:
        state = WriteState.DONE
        try:
            self._driver.synchronize()
        except DriverError as error:  # of a kernel that failed; it will write nothing more
            logger.warning("A copy to a peer's GPU memory failed: %s", error)
            state = WriteState.FAILED
        for copy in list(self._running):
            self._end(copy, state)

    def state_of(self, copy: _CudaCopy) -> WriteState:
        try:
            self._driver.enter()
            if not self._driver.has_happened(copy.slot.done):
                return WriteState.PENDING
            self._end(copy, WriteState.DONE)
        except DriverError as error:  # as in settle
            logger.warning("A copy to a peer's GPU memory failed: %s", error)
            self._end(copy, WriteState.FAILED)
        return copy.state

    def _copy_runs(self, runs: list[Run], src: int, dst: int, src_ids: np.ndarray, dst_ids: np.ndarray,
                   block_bytes: int) -> None:
        for first, count in runs:
            self._driver.copy(dst + int(dst_ids[first]) * block_bytes, src + int(src_ids[first]) * block_bytes,
                              count * block_bytes)

    def _scatter(self, slot: _Slot, src: int, dst: int, src_ids: np.ndarray, dst_ids: np.ndarray,
                 block_bytes: int) -> None:
        shape, count = BlockShape.of(block_bytes), len(src_ids)
        kernel = compiled(shape, self._device)
        ids, address = slot.reserve_ids(2 * count)
        ids[:count], ids[count:] = src_ids, dst_ids
        self._driver.copy(address, ids.ctypes.data, ids.nbytes)
        parameters = slot.parameters
        parameters.src, parameters.dst, parameters.ids = src, dst, address
        parameters.count, parameters.words = count, shape.words
        self._driver.launch(kernel, shape.programs_for(count), slot.pointers)

    def _end(self, copy: _CudaCopy, state: WriteState) -> None:
        copy.state = state
        self._running.discard(copy)
        if state is WriteState.DONE:
            self._idle.append(copy.slot)


def find_runs(src_ids: np.ndarray, dst_ids: np.ndarray, most: int) -> list[Run] | None:
    """Finds runs of blocks that are neighbours on both sides; None where there are more than ``most``."""
    breaks = np.flatnonzero((src_ids[1:] - src_ids[:-1] != 1) | (dst_ids[1:] - dst_ids[:-1] != 1)) + 1
    if len(breaks) >= most:
        return None
    edges = [0, *breaks.tolist(), len(src_ids)]
    return [(first, last - first) for first, last in zip(edges, edges[1:])]


class _CudaCopy:
    def __init__(self, memory: CudaMemory, slot: _Slot):
        self._memory, self.slot = memory, slot
        self.state = WriteState.PENDING

    def poll(self) -> WriteState:
        return self._memory.state_of(self) if self.state is WriteState.PENDING else self.state


_NUM_SLOTS = 8
_SLOT_IDS = 1 << 15


class _Parameters(ctypes.Structure):
    """Parameters of the kernel; the last two are Triton's own."""

    _fields_ = [("src", ctypes.c_uint64), ("dst", ctypes.c_uint64), ("ids", ctypes.c_uint64), ("count", ctypes.c_int32),
                ("words", ctypes.c_int32), ("scratch", ctypes.c_uint64), ("profile", ctypes.c_uint64)]


class _Slot:
    """Buffers and event of one copy while it runs."""

    def __init__(self, driver: Driver):
        self._driver = driver
        self._staging: Staging = driver.stage(_SLOT_IDS)
        self.done = driver.new_event()
        self.parameters = _Parameters()
        begin = ctypes.addressof(self.parameters)
        offsets = [getattr(_Parameters, field[0]).offset for field in _Parameters._fields_]
        self.pointers = (ctypes.c_void_p * len(offsets))(*(begin + offset for offset in offsets))

    def reserve_ids(self, count: int) -> tuple[np.ndarray, int]:
        """Returns page-locked memory for ``count`` ids, and the address of as much memory on the GPU."""
        if count > len(self._staging.host):
            self._staging = self._driver.stage(1 << (count - 1).bit_length())
        return self._staging.host[:count], self._staging.address
