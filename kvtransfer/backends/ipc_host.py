"""Shared host memory, for the ipc backend."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...common.api.errors import ConfigError, TransferFailed
from ...common.api.unreadable import UNREADABLE
from ...common.shared_memory.host import HostHandle, handle_of, map_handle
from .base import Region, WriteState

_BYTES_PER_POLL = 8 << 20
"""Bytes that one poll copies, in a millisecond or two: between polls the same thread answers pings."""


class HostMemory:
    """Pools in memory of ``common.shared_memory.host``; polling a copy copies, in the caller's thread."""

    def __init__(self) -> None:
        self._mapped: dict[int, np.ndarray] = {}

    def export(self, region: Region) -> bytes:
        handle = handle_of(region.address, region.num_bytes)
        if handle is None:
            raise ConfigError("--disaggregation-transfer-backend ipc needs a KV pool in shared memory.")
        return msgspec.msgpack.encode(handle)

    def attach(self, handle: bytes, region: Region, *, ours: bool) -> int:
        try:
            array = map_handle(msgspec.msgpack.decode(handle, type=HostHandle), region.num_bytes)
        except (OSError, *UNREADABLE) as error:
            raise TransferFailed(f"the peer's memory cannot be mapped ({error}): both servers must run as one user and "
                                 f"in one PID namespace, or use --disaggregation-transfer-backend nixl.",
                                 cause="mismatch") from None
        address: int = array.ctypes.data
        self._mapped[address] = array
        return address

    def detach(self, address: int) -> None:
        del self._mapped[address]

    def prepare(self, block_bytes: int) -> None:
        pass

    def map_flags(self, flags: np.ndarray) -> int:
        address: int = flags.ctypes.data
        return address

    def unmap_flags(self, flags: np.ndarray) -> None:
        pass

    def write_flag(self, address: int, value: int, after: Sequence[Any]) -> None:
        flag = _PendingFlag(address, value, len(after))
        for copy in after:
            copy.flags.append(flag)
        if not after:
            flag.write()

    def copy(self, src: int, dst: int, src_ids: np.ndarray, dst_ids: np.ndarray, block_bytes: int) -> _HostCopy:
        return _HostCopy(_blocks_at(src, src_ids, block_bytes), _blocks_at(dst, dst_ids, block_bytes), src_ids, dst_ids)

    def wait_for_copies(self) -> None:
        pass  # a copy that is not polled does not continue


@dataclass
class _PendingFlag:
    """A completion flag to be written after ``num_copies`` more copies."""

    address: int
    value: int
    num_copies: int

    def write(self) -> None:
        ctypes.c_int64.from_address(self.address).value = self.value

    def count_copy(self) -> None:
        self.num_copies -= 1
        if self.num_copies == 0:
            self.write()


class _HostCopy:
    def __init__(self, src: np.ndarray, dst: np.ndarray, src_ids: np.ndarray, dst_ids: np.ndarray):
        self._src, self._dst, self._src_ids, self._dst_ids = src, dst, src_ids, dst_ids
        self._step = max(1, _BYTES_PER_POLL // src.shape[1])
        self._done = 0
        self.flags: list[_PendingFlag] = []

    def poll(self) -> WriteState:
        now = slice(self._done, self._done + self._step)
        self._dst[self._dst_ids[now]] = self._src[self._src_ids[now]]
        self._done += self._step
        if self._done < len(self._src_ids):
            return WriteState.PENDING
        for flag in self.flags:
            flag.count_copy()
        return WriteState.DONE


def _blocks_at(address: int, ids: np.ndarray, block_bytes: int) -> np.ndarray:
    """``[blocks, block_bytes]``: a view of memory that others own, up to the largest of ``ids``."""
    num_bytes = (int(ids.max()) + 1) * block_bytes
    memory = memoryview((ctypes.c_uint8 * num_bytes).from_address(address)).cast("B")
    return np.frombuffer(memory, dtype=np.uint8).reshape(-1, block_bytes)
