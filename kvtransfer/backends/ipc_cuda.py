"""GPU memory by CUDA IPC, for the ipc backend.

A handle leads to the allocation that an address lies in; the offset travels beside it. The same memory opened twice is
one mapping, counted by the driver.

Long runs of neighbouring blocks are left to the copy engines, which fill the link and leave the multiprocessors alone,
but take microseconds for each run; scattered blocks are copied by a kernel. The host's part of a write is short either
way: what a copy needs (room for its ids on both sides, an event, the parameters of a launch) is kept and used again.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import msgspec
import numpy as np

from ...common.api.errors import ConfigError, TransferFailed
from ...common.api.unreadable import UNREADABLE
from ...kernels import _triton
from ...kernels.comm.copy_blocks import BlockShape, compiled
from .base import Region, WriteState
from .cuda_driver import Driver, DriverError, Staging

logger = logging.getLogger(__name__)

RUN_BYTES = 32 << 20
"""Blocks go in runs from this length on, on the average. A run costs a copy engine 6 us beside its bytes: between two
H200s runs of 4 MiB go at 225 GB/s, of 16 at 319, a single one at 389; the kernel copies at 348."""

Run = tuple[int, int]  # the place of its first block, and how many there are


class _Exported(msgspec.Struct):
    handle: bytes
    offset: int


class CudaMemory:
    """Pools on one GPU. Copies run on a stream of their own, before other work that waits: they are short, and
    requests wait for them."""

    def __init__(self, device: int):
        if not _triton.AVAILABLE:
            raise ConfigError("--disaggregation-transfer-backend ipc needs the triton package on GPUs.")
        self._device = device
        self._driver = Driver(device)
        self._mapped: dict[int, int | None] = {}  # a region's address, and where its allocation begins; None: our own
        self._running: set[_CudaCopy] = set()
        self._idle: list[_Slot] = []

    def export(self, region: Region) -> bytes:
        try:
            begin = self._driver.allocation_of(region.address)
            handle = self._driver.handle_of(begin)
        except DriverError as error:
            raise ConfigError(f"The KV pool cannot be shared with other processes ({error}); "
                              f"--disaggregation-transfer-backend ipc does not work with expandable_segments in "
                              f"PYTORCH_CUDA_ALLOC_CONF.") from None
        return msgspec.msgpack.encode(_Exported(handle, region.address - begin))

    def attach(self, handle: bytes, region: Region, *, ours: bool) -> int:
        if ours:  # which the driver refuses to open
            if region.device != self._device:
                raise TransferFailed("two GPUs of one process")
            self._mapped[region.address] = None
            return region.address
        try:
            exported = msgspec.msgpack.decode(handle, type=_Exported)
            begin = self._driver.open(exported.handle)
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
                self._driver.close(begin)
        except DriverError as error:
            logger.warning("GPU memory of a peer stays mapped: %s", error)

    def enroll(self, bells: np.ndarray) -> int:
        try:
            return self._driver.map_host(bells.ctypes.data, bells.nbytes)
        except DriverError as error:
            raise TransferFailed(f"the GPU does not reach host memory of the peer: {error}") from None

    def dismiss(self, bells: np.ndarray) -> None:
        try:
            self._driver.unmap_host(bells.ctypes.data)
        except DriverError as error:
            logger.warning("Host memory of a peer stays mapped: %s", error)

    def ring(self, address: int, value: int, after: Sequence[object]) -> None:
        """The stream's order is enough."""
        try:
            self._driver.enter()
            self._driver.put(address, value)
        except DriverError as error:
            raise TransferFailed(f"the GPU writes no value: {error}") from error

    def prepare(self, block_bytes: int) -> None:
        """Compile the kernel now, which the first prompt would wait for, and make room for a few copies."""
        compiled(BlockShape.of(block_bytes), self._device)
        self._driver.enter()
        while len(self._idle) < _SLOTS:
            self._idle.append(_Slot(self._driver))

    def copy(self, src: int, dst: int, src_ids: np.ndarray, dst_ids: np.ndarray, block_bytes: int) -> _CudaCopy:
        try:
            self._driver.enter()
            slot = self._idle.pop() if self._idle else _Slot(self._driver)
            copy = _CudaCopy(self, slot)
            self._running.add(copy)
            runs = runs_of(src_ids, dst_ids, max(1, len(src_ids) * block_bytes // RUN_BYTES))
            if runs is None:
                self._scatter(slot, src, dst, src_ids, dst_ids, block_bytes)
            else:
                self._copy_runs(runs, src, dst, src_ids, dst_ids, block_bytes)
            self._driver.record(slot.done)
        except (DriverError, RuntimeError) as error:  # the driver's; torch's and Triton's
            self.settle()  # a part may have been started
            raise TransferFailed(f"the GPU copies nothing: {error}") from error
        return copy

    def settle(self) -> None:
        state = WriteState.DONE
        try:
            self._driver.synchronize()
        except DriverError as error:  # of a kernel that failed; what it has not written, it will not write
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
        ids, address = slot.room_for(2 * count)
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


def runs_of(src_ids: np.ndarray, dst_ids: np.ndarray, most: int) -> list[Run] | None:
    """Runs of blocks that are neighbours on both sides; None where they are more than ``most``."""
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


_SLOTS = 8
_SLOT_IDS = 1 << 15


class _Parameters(ctypes.Structure):
    """Of the kernel; the last two are Triton's own."""

    _fields_ = [("src", ctypes.c_uint64), ("dst", ctypes.c_uint64), ("ids", ctypes.c_uint64), ("count", ctypes.c_int32),
                ("words", ctypes.c_int32), ("scratch", ctypes.c_uint64), ("profile", ctypes.c_uint64)]


class _Slot:
    """What one copy needs while it runs."""

    def __init__(self, driver: Driver):
        self._driver = driver
        self._staging: Staging = driver.stage(_SLOT_IDS)
        self.done = driver.new_event()
        self.parameters = _Parameters()
        begin = ctypes.addressof(self.parameters)
        offsets = [getattr(_Parameters, field[0]).offset for field in _Parameters._fields_]
        self.pointers = (ctypes.c_void_p * len(offsets))(*(begin + offset for offset in offsets))

    def room_for(self, count: int) -> tuple[np.ndarray, int]:
        """Page-locked memory for so many ids, and the address of as much on the GPU."""
        if count > len(self._staging.host):
            self._staging = self._driver.stage(1 << (count - 1).bit_length())
        return self._staging.host[:count], self._staging.address
