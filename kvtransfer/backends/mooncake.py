"""Mooncake's transfer engine: RDMA over the devices of ``--disaggregation-ib-device``, else TCP.

Its batches take lists of addresses, so numpy first merges runs of blocks that are neighbours on both sides: the engine
handles each entry separately. A call blocks until its batch is complete at the target, without the interpreter's lock;
threads of our own make the calls, so that several writes are in flight.

The engine cannot withdraw a posted write. A call returns when its writes have ended, or fails after MC_TRANSFER_TIMEOUT
(30 s unless the environment says otherwise) with the rest of them still in flight; so does the removal of a peer. Such
a write can arrive when a broken network heals. The decode server therefore quarantines the pages of a connection that
ended for ``quarantine_seconds``, or until another instance of the prefill server answers:

* RDMA: a queue pair retransmits for some 4 s before it gives up, and the engine tries a slice at most 9 times, on other
  paths too (MC_RETRY_CNT).
* TCP: the kernel retransmits for 924 s (net.ipv4.tcp_retries2 at its default of 15).
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import numpy as np

from ...common.api.errors import ConfigError, TransferFailed
from ...common.api.unreadable import UNREADABLE
from ...common.config.server.disaggregation import TRANSFER_BACKENDS
from .base import Backend, BackendSettings, PageCounts, Region, WriteState, pack_counts, unpack_counts

logger = logging.getLogger(__name__)

_NUM_THREADS = 4
_RDMA_QUARANTINE_SECONDS, _TCP_QUARANTINE_SECONDS = 60.0, 960.0  # see above
_WILDCARDS = ("0.0.0.0", "::")


class _Metadata(msgspec.Struct):
    session: str
    regions: list[tuple[int, int, int]]
    num_pages: PageCounts


@dataclass(eq=False)
class _Peer:
    session: str
    src: list[_Blocks]
    dst: list[_Blocks]
    removed: bool = False


@dataclass(frozen=True)
class _Blocks:
    """Memory of a layer group, cut into blocks of equal size."""

    address: int
    num_bytes: int


@dataclass(eq=False)
class _Write:
    peer: _Peer
    future: Future[int]


class MooncakeBackend:
    """``host`` is the address that peers reach this process at. Raises ConfigError when the engine does not start."""

    name = "mooncake"
    scope = ""
    progress_interval: float | None = None

    def __init__(self, host: str, ib_device: str | None) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")  # its other lines go to stderr for every connection
        try:
            with capture_stderr():
                from mooncake.engine import TransferEngine
        except ImportError as error:
            raise ConfigError(
                f"--disaggregation-transfer-backend mooncake needs the mooncake-transfer-engine package (without CUDA: "
                f"mooncake-transfer-engine-non-cuda) and the libraries it is linked with: {error}.") from None
        if host in _WILDCARDS:
            raise ConfigError(f"--disaggregation-transfer-backend mooncake needs the address that peers reach this "
                              f"server at as --host, not {host}.")
        protocol, device = ("tcp", "") if ib_device is None else ("rdma", ib_device)
        with capture_stderr() as lines:
            self._engine = TransferEngine()
            failed = self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0
        if failed:
            raise ConfigError(f"Mooncake's transfer engine does not start on {host} over {protocol}"
                              f"{' with --disaggregation-ib-device ' + device if device else ''}: "
                              f"{lines[-1] if lines else 'it does not say why'}.")
        self.quarantine_seconds = _TCP_QUARANTINE_SECONDS if ib_device is None else _RDMA_QUARANTINE_SECONDS
        self._session = f"{host}:{self._engine.get_rpc_port()}"
        self._regions: list[Region] = []
        self._num_pages: list[int] = []
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kv-mooncake")

    def register(self, regions: Sequence[Region], num_pages: Sequence[int]) -> None:
        for region in regions:
            if self._engine.register_memory(region.address, region.num_bytes) != 0:
                raise ConfigError("Mooncake cannot register the KV pool; its log says why.")
            self._regions.append(region)
        self._num_pages = list(num_pages)

    def local_metadata(self) -> bytes:
        regions = [(region.address, region.num_bytes, region.device) for region in self._regions]
        return msgspec.msgpack.encode(_Metadata(self._session, regions, pack_counts(self._num_pages)))

    def add_peer(self, metadata: bytes, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> _Peer:
        try:
            description = msgspec.msgpack.decode(metadata, type=_Metadata)
        except UNREADABLE as error:
            raise TransferFailed(f"the peer's description of its memory is unreadable: {error}") from None
        theirs = [Region(*region) for region in description.regions]
        return _Peer(description.session, _cut(self._regions, self._num_pages, src_blocks),
                     _cut(theirs, unpack_counts(description.num_pages, theirs), dst_blocks))

    def remove_peer(self, peer: _Peer) -> None:
        peer.removed = True

    def write(self, peer: _Peer, src_group: int, src_ids: np.ndarray, dst_group: int, dst_ids: np.ndarray) -> _Write:
        if peer.removed:
            raise TransferFailed("the peer is not connected")
        src, dst = peer.src[src_group], peer.dst[dst_group]
        starts, lengths = find_runs(src_ids, dst_ids)
        return _Write(peer, self._threads.submit(
            self._engine.batch_transfer_sync_write, peer.session,
            (src.address + src_ids[starts] * src.num_bytes).tolist(),
            (dst.address + dst_ids[starts] * dst.num_bytes).tolist(), (lengths * src.num_bytes).tolist()))

    def poll(self, write: _Write) -> WriteState:
        if not write.future.done():
            return WriteState.PENDING
        ok = write.future.exception() is None and write.future.result() == 0 and not write.peer.removed
        return WriteState.DONE if ok else WriteState.FAILED

    def write_flag(self, peer: object, value: int) -> None:
        return None

    def completion_flags(self) -> None:
        return None

    def progress(self) -> None:
        pass  # the engine has threads of its own

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for region in self._regions:
            self._engine.unregister_memory(region.address)
        self._regions.clear()


@contextmanager
def capture_stderr() -> Iterator[list[str]]:
    """Captures what the engine's C++ writes to stderr while it starts, which includes an error even on success: the
    lines are in the list afterwards, and in our log at debug level."""
    lines: list[str] = []
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            lines.extend(file.read().decode(errors="replace").splitlines())
    for line in lines:
        logger.debug("Mooncake: %s", line)


def find_runs(src_ids: np.ndarray, dst_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns ``(starts, lengths)`` of the runs in which both sides' ids ``[n]``, n >= 1, increase by one."""
    breaks = np.flatnonzero((np.diff(src_ids) != 1) | (np.diff(dst_ids) != 1)) + 1
    starts = np.concatenate([np.zeros(1, np.int64), breaks])
    return starts, np.diff(starts, append=len(src_ids))


def _cut(regions: Sequence[Region], num_pages: Sequence[int], blocks: Sequence[int]) -> list[_Blocks]:
    return [_Blocks(region.address, region.num_bytes // (pages * count))
            for region, pages, count in zip(regions, num_pages, blocks)]


@TRANSFER_BACKENDS.register("mooncake", needs={"mooncake": "mooncake-transfer-engine"})
def make(settings: BackendSettings) -> Backend:
    return MooncakeBackend(settings.host, settings.ib_device)
