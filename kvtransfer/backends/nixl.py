"""NIXL over UCX: RDMA, NVLink (CUDA IPC), shared memory or TCP, whichever the two processes share.

When is a write visible at the target? NIXL's UCX plugin posts the pages of one transfer as UCX puts, followed by a
flush of the endpoint, and reports the transfer done when the flush is. UCX defines a flush as the completion of all
earlier puts "both at the origin and at the target", and NIXL sends its own notification no earlier than that. So
DONE means visible, and the result message that follows over the control channel needs no second signal.

Descriptors of all blocks are prepared once, per layer group and peer. A write then names them by index arrays, which
NIXL turns into one transfer in C++, merging runs that are neighbours on both sides. That takes 20 to 40 us for 256 MiB;
the same runs merged by numpy and passed as new descriptors take 150 to 240 us and arrive no sooner.

NIXL's progress thread spins on a core when its delay is 0, and its Python API offers no other value. We have
a thread anyway, so the writer progresses UCX by polling its writes, and the target by ``progress``.
"""

from __future__ import annotations

import itertools
import logging
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ...common.api.errors import ConfigError, TransferFailed
from ...common.config.server.disaggregation import TRANSFER_BACKENDS
from .base import Backend, BackendSettings, PageCounts, Region, WriteState, pack_counts, unpack_counts

logger = logging.getLogger(__name__)

_LOCAL = "NIXL_INIT_AGENT"


class _Metadata(msgspec.Struct):
    agent: bytes
    regions: list[tuple[int, int, int]]
    num_pages: PageCounts


@dataclass
class _Peer:
    agent_name: str
    ours: list[Any]  # prepared descriptors of each layer group, cut as this peer needs them
    theirs: list[Any]
    writes: list[_Write] = field(default_factory=list)
    removed: bool = False


@dataclass(eq=False)
class _Write:
    peer: _Peer
    transfer: Any
    state: str


class NixlBackend:
    """One NIXL agent with the UCX backend. Raises ConfigError when NIXL is not installed or does not start."""

    name = "nixl"
    scope = ""
    quarantine_seconds = 0.0
    progress_interval: float | None = 1e-3

    def __init__(self) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ConfigError(f"--disaggregation-transfer-backend nixl needs the nixl package: {error}.") from None
        if "NIXL_LOG_LEVEL" not in os.environ:  # importing it sends INFO to stdout
            logging.getLogger("nixl").setLevel(logging.WARNING)
        config = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        try:
            self._agent = nixl_agent(uuid.uuid4().hex, config)
        except Exception as error:  # the bindings' exceptions have no common base
            raise ConfigError(f"NIXL's UCX backend does not start ({error}); check the UCX_ variables of the "
                              f"environment.") from error
        if "UCX" not in self._agent.backends:
            raise ConfigError("NIXL found no UCX plugin; reinstall the nixl package.")
        self._registered: Any = None
        self._regions: list[Region] = []
        self._num_pages: list[int] = []
        self._cuts: dict[tuple[int, ...], list[Any]] = {}  # our prepared descriptors, by the blocks of a page
        self._peers: list[_Peer] = []

    def register(self, regions: Sequence[Region], num_pages: Sequence[int]) -> None:
        self._regions, self._num_pages = list(regions), list(num_pages)
        rows = [(region.address, region.num_bytes, max(region.device, 0), "") for region in regions]
        try:
            self._registered = self._agent.register_memory(rows, _memory_kind(regions))
        except Exception as error:  # no common base, as above
            raise ConfigError(f"NIXL cannot register the KV pool: {error}.") from error

    def local_metadata(self) -> bytes:
        regions = [(region.address, region.num_bytes, region.device) for region in self._regions]
        return msgspec.msgpack.encode(_Metadata(self._agent.get_agent_metadata(), regions,
                                                pack_counts(self._num_pages)))

    def add_peer(self, metadata: bytes, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> _Peer:
        try:
            if (cut := tuple(src_blocks)) not in self._cuts:
                self._cuts[cut] = [self._prepare(_LOCAL, region, count * blocks)
                                   for region, count, blocks in zip(self._regions, self._num_pages, cut)]
            description = msgspec.msgpack.decode(metadata, type=_Metadata)
            name = self._agent.add_remote_agent(description.agent)
            name = name.decode() if isinstance(name, bytes) else name
            counts = unpack_counts(description.num_pages, description.regions)
            theirs = [self._prepare(name, Region(*region), count * blocks)
                      for region, count, blocks in zip(description.regions, counts, dst_blocks)]
        except Exception as error:  # as above; the metadata is a peer's
            raise TransferFailed(f"NIXL cannot connect to the peer's memory: {error}") from error
        peer = _Peer(name, self._cuts[cut], theirs)
        self._peers.append(peer)
        return peer

    def remove_peer(self, peer: _Peer) -> None:
        if peer.removed:
            return
        peer.removed = True
        self._peers.remove(peer)
        for write in peer.writes:
            _release(write.transfer)
        for blocks in peer.theirs:
            _release(blocks)
        try:
            self._agent.remove_remote_agent(peer.agent_name)
        except Exception as error:
            logger.warning("NIXL could not disconnect from %s: %s", peer.agent_name, error)

    def write(self, peer: _Peer, src_group: int, src_ids: np.ndarray, dst_group: int, dst_ids: np.ndarray) -> _Write:
        if peer.removed:
            raise TransferFailed("the peer is not connected")
        try:
            transfer = self._agent.make_prepped_xfer("WRITE", peer.ours[src_group], src_ids.astype(np.int32),
                                                     peer.theirs[dst_group], dst_ids.astype(np.int32))
        except Exception as error:
            raise TransferFailed(f"NIXL cannot write: {error}") from error
        write = _Write(peer, transfer, "PROC")
        peer.writes.append(write)
        try:
            write.state = self._agent.transfer(transfer)
        except Exception as error:
            # Part of the write may have started: it is reported as failed, which ends the connection.
            logger.warning("A NIXL write failed: %s", error)
            write.state = "ERR"
        return write

    def poll(self, write: _Write) -> WriteState:
        if write.peer.removed:
            return WriteState.FAILED
        try:
            if write.state == "PROC":
                write.state = self._agent.check_xfer_state(write.transfer)
        except Exception as error:
            logger.warning("A NIXL write failed: %s", error)
            write.state = "ERR"
        if write.state == "PROC":
            return WriteState.PENDING
        write.peer.writes.remove(write)
        _release(write.transfer)
        return WriteState.DONE if write.state == "DONE" else WriteState.FAILED

    def write_flag(self, peer: object, value: int) -> None:
        return None

    def completion_flags(self) -> None:
        return None

    def progress(self) -> None:
        self._agent.get_new_notifs()

    def close(self) -> None:
        for peer in list(self._peers):
            self.remove_peer(peer)
        for blocks in itertools.chain(*self._cuts.values()):
            _release(blocks)
        self._cuts.clear()
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self._registered = None

    def _prepare(self, agent_name: str, region: Region, num_blocks: int) -> Any:
        block_bytes = region.num_bytes // num_blocks
        rows = np.empty((num_blocks, 3), dtype=np.uint64)
        rows[:, 0] = np.uint64(region.address) + np.arange(num_blocks, dtype=np.uint64) * np.uint64(block_bytes)
        rows[:, 1] = block_bytes
        rows[:, 2] = max(region.device, 0)
        return self._agent.prep_xfer_dlist(agent_name, rows, _memory_kind([region]))


def _memory_kind(regions: Sequence[Region]) -> str:
    on_gpu = {region.device >= 0 for region in regions}
    assert len(on_gpu) == 1, "a pool is either on GPUs or in host memory"
    return "VRAM" if on_gpu.pop() else "DRAM"


def _release(handle: Any) -> None:
    try:
        handle.release()
    except Exception as error:
        logger.debug("NIXL keeps a handle until its agent ends: %s", error)


@TRANSFER_BACKENDS.register("nixl", needs={"nixl": "nixl"})
def make(settings: BackendSettings) -> Backend:
    return NixlBackend()
