"""The ipc backend: maps the memory of a peer on the same host and copies into it, over NVLink between GPUs.

A receiver exports handles of its memory (CUDA IPC's, or those of shared host memory). A sender maps them when it
connects and then copies blocks straight to their destinations, with one kernel for a whole write, so that neither the
size of the blocks nor their order costs anything, and the transport has no thread, queue or protocol.

When is a write visible at the target? A kernel's stores reach the memory of a GPU before the kernel is complete, and
its event marks that completion. Host memory is coherent.

A peer is removed in this order: its copies end (they take milliseconds, and nothing can delay them), then its memory is
unmapped. So no write of ours arrives afterwards.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from ...common.api.errors import ConfigError, TransferFailed
from ...common.api.unreadable import UNREADABLE
from ...common.config.server.disaggregation import TRANSFER_BACKENDS
from ...common.shared_memory.host import HostHandle, handle_of, map_handle, shared_bytes
from .base import Backend, BackendSettings, PageCounts, Region, WriteState, pack_counts

logger = logging.getLogger(__name__)

_PROCESS = secrets.token_hex(8)
"""Unique to this process; a PID is unique only within its namespace."""
_NUM_FLAGS = 4096
"""Completion flags of a process. They are reused in turn: an unread flag is overwritten after as many more writes."""


class Copy(Protocol):
    """A copy of blocks in flight."""

    def poll(self) -> WriteState: ...


class Memory(Protocol):
    """One kind of memory, on a GPU or in the host. Methods may be called in any thread, one at a time."""

    def export(self, region: Region) -> bytes:
        """Returns a handle for other processes of this host. Raises ConfigError where there can be none."""

    def attach(self, handle: bytes, region: Region, *, ours: bool) -> int:
        """Maps a peer's region and returns its address here; ``ours``: the peer is in this process.
        Raises TransferFailed where that is impossible."""

    def detach(self, address: int) -> None:
        """Unmaps the region that ``attach`` mapped at ``address``."""

    def prepare(self, block_bytes: int) -> None:
        """Prepares for copies of blocks of this size."""

    def copy(self, src: int, dst: int, src_ids: np.ndarray, dst_ids: np.ndarray, block_bytes: int) -> Copy:
        """Starts to copy blocks ``src_ids[i]``, counted from address ``src``, to blocks ``dst_ids[i]`` from ``dst``."""

    def map_flags(self, flags: np.ndarray) -> int:
        """Maps a peer's completion flags, in host memory, and returns their address for ``write_flag``. Raises
        TransferFailed where that is impossible."""

    def unmap_flags(self, flags: np.ndarray) -> None:
        """Undoes ``map_flags``."""

    def write_flag(self, address: int, value: int, after: Sequence[Copy]) -> None:
        """Writes ``value`` to ``address`` when ``after``, all copies to a peer that are in flight, are done. Raises
        TransferFailed where that is impossible."""

    def wait_for_copies(self) -> None:
        """Waits until no copy is running any more."""


class _Metadata(msgspec.Struct):
    host: str
    process: str
    regions: list[tuple[int, int, int]]
    num_pages: PageCounts
    handles: list[bytes]
    flags: HostHandle | None = msgspec.field(default=None, name="bells")


@dataclass(eq=False)
class _Peer:
    addresses: list[int]
    src_blocks: Sequence[int]
    dst_blocks: Sequence[int]
    copies: dict[int, Copy] = field(default_factory=dict)  # in flight, by the ids of their writes
    flags: np.ndarray | None = None
    flags_address: int = 0
    removed: bool = False


@dataclass(eq=False)
class _Write:
    peer: _Peer
    copy: Copy


class IpcBackend:
    """Copies into mapped memory; ``register`` determines the kind of memory from the pool."""

    name = "ipc"
    quarantine_seconds = 0.0
    progress_interval: float | None = None

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self.scope = ""
        self._regions: list[Region] = []
        self._num_pages: list[int] = []
        self._handles: list[bytes] = []
        self._peers: list[_Peer] = []
        self._flags: np.ndarray | None = None
        self._flag_numbers = itertools.count(secrets.randbelow(_NUM_FLAGS))

    def register(self, regions: Sequence[Region], num_pages: Sequence[int]) -> None:
        self.scope = _host_id()
        self._memory = _make_memory(regions)
        self._handles = [self._memory.export(region) for region in regions]
        self._regions, self._num_pages = list(regions), list(num_pages)
        try:
            self._flags = shared_bytes(8 * _NUM_FLAGS).view(np.int64)
        except OSError as error:
            logger.info("There is no shared memory for completion flags; messages alone report pages: %s", error)

    def local_metadata(self) -> bytes:
        regions = [(region.address, region.num_bytes, region.device) for region in self._regions]
        flags = None if self._flags is None else handle_of(self._flags.ctypes.data, self._flags.nbytes)
        return msgspec.msgpack.encode(_Metadata(self.scope, _PROCESS, regions, pack_counts(self._num_pages),
                                                self._handles, flags))

    def add_peer(self, metadata: bytes, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> _Peer:
        try:
            description = msgspec.msgpack.decode(metadata, type=_Metadata)
        except UNREADABLE as error:
            raise TransferFailed(f"the peer's description of its memory is unreadable: {error}") from None
        if description.host != self.scope:
            raise TransferFailed("the peer is on another host, which --disaggregation-transfer-backend ipc does not "
                                 "reach; use nixl on both sides.", cause="mismatch")
        theirs = [Region(*region) for region in description.regions]
        if (theirs[0].device < 0) != (self._regions[0].device < 0):
            raise TransferFailed("one pool is on a GPU and the other in host memory; "
                                 "--disaggregation-transfer-backend ipc needs both alike.", cause="mismatch")
        peer = _Peer([], src_blocks, dst_blocks)
        try:
            for handle, region in zip(description.handles, theirs):
                peer.addresses.append(self._pool_memory.attach(handle, region, ours=description.process == _PROCESS))
            for region, num_pages, blocks in zip(self._regions, self._num_pages, src_blocks):
                self._pool_memory.prepare(region.num_bytes // (num_pages * blocks))
        except TransferFailed:
            self._detach(peer)
            raise
        if description.flags is not None:
            self._map_flags(peer, description.flags)
        self._peers.append(peer)
        return peer

    def remove_peer(self, peer: _Peer) -> None:
        if peer.removed:
            return
        peer.removed = True
        self._peers.remove(peer)
        if peer.copies or peer.flags is not None:  # a write of a flag may follow the last copy
            self._pool_memory.wait_for_copies()
        self._detach(peer)

    def write(self, peer: _Peer, src_group: int, src_ids: np.ndarray, dst_group: int, dst_ids: np.ndarray) -> _Write:
        if peer.removed:
            raise TransferFailed("the peer is not connected")
        region = self._regions[src_group]
        block_bytes = region.num_bytes // (self._num_pages[src_group] * peer.src_blocks[src_group])
        copy = self._pool_memory.copy(region.address, peer.addresses[dst_group], src_ids, dst_ids, block_bytes)
        write = _Write(peer, copy)
        peer.copies[id(write)] = copy
        return write

    def poll(self, write: _Write) -> WriteState:
        if write.peer.removed:
            return WriteState.FAILED
        state = write.copy.poll()
        if state is not WriteState.PENDING:
            del write.peer.copies[id(write)]
        return state

    def write_flag(self, peer: _Peer, value: int) -> int | None:
        if peer.removed or peer.flags is None:
            return None
        flag = next(self._flag_numbers) % len(peer.flags)
        try:
            self._pool_memory.write_flag(peer.flags_address + 8 * flag, value, list(peer.copies.values()))
        except TransferFailed as error:
            logger.warning("A peer's completion flag is not written: %s", error.message)
            return None
        return flag

    def completion_flags(self) -> np.ndarray | None:
        return self._flags

    def progress(self) -> None:
        pass  # the target takes no part

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove_peer(peer)

    @property
    def _pool_memory(self) -> Memory:
        assert self._memory is not None, "register comes first"
        return self._memory

    def _map_flags(self, peer: _Peer, handle: HostHandle) -> None:
        try:
            flags = map_handle(handle, 8 * _NUM_FLAGS).view(np.int64)
            peer.flags_address = self._pool_memory.map_flags(flags)
        except (OSError, TransferFailed) as error:
            logger.info("A peer's completion flags cannot be mapped; messages alone report pages to it: %s", error)
            return
        peer.flags = flags

    def _detach(self, peer: _Peer) -> None:
        if peer.flags is not None:
            self._pool_memory.unmap_flags(peer.flags)
            peer.flags = None
        for address in peer.addresses:
            self._pool_memory.detach(address)


def _make_memory(regions: Sequence[Region]) -> Memory:
    devices = {region.device for region in regions}
    assert len(devices) == 1, "a pool lies on one device"
    if (device := devices.pop()) < 0:
        from .ipc_host import HostMemory
        return HostMemory()
    from .ipc_cuda import CudaMemory
    return CudaMemory(device)


def _host_id() -> str:
    """Returns an id that all processes of a running kernel share, in containers too."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        raise ConfigError("--disaggregation-transfer-backend ipc needs Linux: this system has no "
                          "/proc/sys/kernel/random/boot_id.") from None


@TRANSFER_BACKENDS.register("ipc", traits=("maps_host_memory",))
def make(settings: BackendSettings) -> Backend:
    return IpcBackend()
