"""Memory of a peer on the same host, mapped and written by ourselves: over NVLink between GPUs, else by the processor.

A receiver gives out handles of its memory (CUDA IPC's, or those of shared host memory). A sender maps them when it
connects and then copies blocks straight to their places, with one kernel of its own for a whole write, so that neither
the size of the blocks nor where they lie costs anything, and the transport has no thread, queue or protocol.

When is a write visible at the target? A kernel's stores reach the memory of a GPU before the kernel is complete, and
completion is what its event tells; the host's memory is one.

A peer is removed in this order: its copies end (they take milliseconds, and nothing can hold them up), then its memory
is unmapped. So nothing of ours lands afterwards.
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
from ...common.kvcache.host_memory import HostHandle, handle_of, map_handle, shared_bytes
from .base import Region, WriteState

logger = logging.getLogger(__name__)

_PROCESS = secrets.token_hex(8)
"""Tells this process from others; a PID means something only within its namespace."""
_PLACES = 4096
"""Bells of a process; a ring that nobody has looked at may be overwritten when so many more have come."""


class Copy(Protocol):
    """Blocks on their way."""

    def poll(self) -> WriteState: ...


class Memory(Protocol):
    """One kind of memory. The functions of mapped addresses may be called in any thread, one at a time."""

    def export(self, region: Region) -> bytes:
        """A handle for other processes of this host. Raises ConfigError where there can be none."""

    def attach(self, handle: bytes, region: Region, *, ours: bool) -> int:
        """The address at which we reach a peer's region; ``ours``: the peer is in this process.
        Raises TransferFailed where we cannot."""

    def detach(self, address: int) -> None:
        """Unmap what ``attach`` returned."""

    def prepare(self, block_bytes: int) -> None:
        """Copies of blocks of this size are going to come."""

    def copy(self, src: int, dst: int, src_ids: np.ndarray, dst_ids: np.ndarray, block_bytes: int) -> Copy:
        """Start to copy blocks ``src_ids[i]`` from address ``src`` on to ``dst_ids[i]`` from ``dst`` on."""

    def enroll(self, bells: np.ndarray) -> int:
        """Host memory of a peer, whose ``ring`` reaches it at the address returned. Raises TransferFailed where none
        does."""

    def dismiss(self, bells: np.ndarray) -> None:
        """Undo ``enroll``."""

    def ring(self, address: int, value: int, after: Sequence[Copy]) -> None:
        """Put ``value`` there when ``after``, all copies to a peer that are under way, are done. Raises TransferFailed
        when it never will."""

    def settle(self) -> None:
        """Returns when no copy is running any more."""


class _Metadata(msgspec.Struct):
    host: str
    process: str
    regions: list[tuple[int, int, int]]
    num_pages: int
    handles: list[bytes]
    bells: HostHandle | None = None


@dataclass(eq=False)
class _Peer:
    addresses: list[int]
    src_blocks: Sequence[int]
    dst_blocks: Sequence[int]
    copies: dict[int, Copy] = field(default_factory=dict)  # under way, by the ids of their writes
    bells: np.ndarray | None = None
    bells_address: int = 0
    removed: bool = False


@dataclass(eq=False)
class _Write:
    peer: _Peer
    copy: Copy


class IpcBackend:
    """``register`` finds out which kind of memory the pool is of."""

    name = "ipc"
    lingering = 0.0
    progress_interval: float | None = None

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self.scope = ""
        self._regions: list[Region] = []
        self._num_pages = 0
        self._handles: list[bytes] = []
        self._peers: list[_Peer] = []
        self._bells: np.ndarray | None = None
        self._places = itertools.count(secrets.randbelow(_PLACES))

    def register(self, regions: Sequence[Region], num_pages: int) -> None:
        self.scope = _host()
        self._memory = _memory_of(regions)
        self._handles = [self._memory.export(region) for region in regions]
        self._regions, self._num_pages = list(regions), num_pages
        try:
            self._bells = shared_bytes(8 * _PLACES).view(np.int64)
        except OSError as error:
            logger.info("There is no shared memory for bells, so that messages alone tell of pages: %s", error)

    def local_metadata(self) -> bytes:
        regions = [(region.address, region.num_bytes, region.device) for region in self._regions]
        bells = None if self._bells is None else handle_of(self._bells.ctypes.data, self._bells.nbytes)
        return msgspec.msgpack.encode(_Metadata(self.scope, _PROCESS, regions, self._num_pages, self._handles, bells))

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
                peer.addresses.append(self._reach.attach(handle, region, ours=description.process == _PROCESS))
            for region, blocks in zip(self._regions, src_blocks):
                self._reach.prepare(region.num_bytes // (self._num_pages * blocks))
        except TransferFailed:
            self._detach(peer)
            raise
        if description.bells is not None:
            self._enroll(peer, description.bells)
        self._peers.append(peer)
        return peer

    def remove_peer(self, peer: _Peer) -> None:
        if peer.removed:
            return
        peer.removed = True
        self._peers.remove(peer)
        if peer.copies or peer.bells is not None:  # a ring may be behind the last of them
            self._reach.settle()
        self._detach(peer)

    def write(self, peer: _Peer, src_group: int, src_ids: np.ndarray, dst_group: int, dst_ids: np.ndarray) -> _Write:
        if peer.removed:
            raise TransferFailed("the peer is not connected")
        region = self._regions[src_group]
        block_bytes = region.num_bytes // (self._num_pages * peer.src_blocks[src_group])
        copy = self._reach.copy(region.address, peer.addresses[dst_group], src_ids, dst_ids, block_bytes)
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

    def ring(self, peer: _Peer, value: int) -> int | None:
        if peer.removed or peer.bells is None:
            return None
        place = next(self._places) % len(peer.bells)
        try:
            self._reach.ring(peer.bells_address + 8 * place, value, list(peer.copies.values()))
        except TransferFailed as error:
            logger.warning("A peer is not rung at: %s", error.message)
            return None
        return place

    def bells(self) -> np.ndarray | None:
        return self._bells

    def progress(self) -> None:
        pass  # the target takes no part

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove_peer(peer)

    @property
    def _reach(self) -> Memory:
        assert self._memory is not None, "register comes first"
        return self._memory

    def _enroll(self, peer: _Peer, handle: HostHandle) -> None:
        try:
            bells = map_handle(handle, 8 * _PLACES).view(np.int64)
            peer.bells_address = self._reach.enroll(bells)
        except (OSError, TransferFailed) as error:
            logger.info("A peer's bells are out of reach, so that it learns of pages by messages alone: %s", error)
            return
        peer.bells = bells

    def _detach(self, peer: _Peer) -> None:
        if peer.bells is not None:
            self._reach.dismiss(peer.bells)
            peer.bells = None
        for address in peer.addresses:
            self._reach.detach(address)


def _memory_of(regions: Sequence[Region]) -> Memory:
    devices = {region.device for region in regions}
    assert len(devices) == 1, "a pool lies on one device"
    if (device := devices.pop()) < 0:
        from .ipc_host import HostMemory
        return HostMemory()
    from .ipc_cuda import CudaMemory
    return CudaMemory(device)


def _host() -> str:
    """The same for all processes of a running kernel, in containers too."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        raise ConfigError("--disaggregation-transfer-backend ipc needs Linux: this system has no "
                          "/proc/sys/kernel/random/boot_id.") from None
