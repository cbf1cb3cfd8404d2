"""The auto backend: several backends as one, of which each peer gets the first that reaches it.

Between two servers of a host that is mapped memory (ipc), between hosts a network (nixl). Both sides register their
pools with all of their backends, and a peer's metadata has one entry for each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...common.api.errors import ConfigError, TransferFailed
from ...common.api.unreadable import UNREADABLE
from ...common.config.server.disaggregation import TRANSFER_BACKENDS
from .base import Backend, BackendSettings, Peer, Region, Write, WriteState

logger = logging.getLogger(__name__)


class _Reached(NamedTuple):
    """A peer, or a write to it, with the backend that reaches it and the handle that this backend has for it."""

    backend: Backend
    handle: Any


class AutoBackend:
    """Tries ``backends`` in order, the fastest first. One that cannot register the pool is left out."""

    name = "auto"
    scope = ""

    def __init__(self, backends: Sequence[Backend]):
        self._backends = list(backends)
        self.quarantine_seconds = max(backend.quarantine_seconds for backend in backends)
        intervals = [backend.progress_interval for backend in backends if backend.progress_interval is not None]
        self.progress_interval: float | None = min(intervals, default=None)

    def register(self, regions: Sequence[Region], num_pages: Sequence[int]) -> None:
        errors = []
        for backend in list(self._backends):
            try:
                backend.register(regions, num_pages)
            except ConfigError as error:
                logger.warning("Pages do not travel by %s: %s", backend.name, error)
                errors.append(error)
                self._backends.remove(backend)
        if not self._backends:
            raise errors[-1]

    def local_metadata(self) -> bytes:
        return msgspec.msgpack.encode({backend.name: backend.local_metadata() for backend in self._backends})

    def add_peer(self, metadata: bytes, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> Peer:
        try:
            metadata_of = msgspec.msgpack.decode(metadata, type=dict[str, bytes])
        except UNREADABLE as error:
            raise TransferFailed(f"the peer's description of its memory is unreadable: {error}") from None
        reason = TransferFailed(f"the peer's pages travel by {', '.join(metadata_of) or 'nothing'}, and ours by "
                                f"{', '.join(backend.name for backend in self._backends)}", cause="mismatch")
        for backend in self._backends:
            if backend.name in metadata_of:
                try:
                    return _Reached(backend, backend.add_peer(metadata_of[backend.name], src_blocks, dst_blocks))
                except TransferFailed as refused:
                    logger.info("A peer is not reached by %s: %s", backend.name, refused.message)
                    reason = refused
        raise reason

    def remove_peer(self, peer: Peer) -> None:
        peer.backend.remove_peer(peer.handle)

    def write(self, peer: Peer, src_group: int, src_ids: np.ndarray, dst_group: int, dst_ids: np.ndarray) -> Write:
        return _Reached(peer.backend, peer.backend.write(peer.handle, src_group, src_ids, dst_group, dst_ids))

    def poll(self, write: Write) -> WriteState:
        state: WriteState = write.backend.poll(write.handle)
        return state

    def write_flag(self, peer: Peer, value: int) -> int | None:
        flag: int | None = peer.backend.write_flag(peer.handle, value)
        return flag

    def completion_flags(self) -> np.ndarray | None:
        """Returns the flags of the first backend that has any."""
        return next((flags for backend in self._backends if (flags := backend.completion_flags()) is not None), None)

    def progress(self) -> None:
        for backend in self._backends:
            backend.progress()

    def close(self) -> None:
        for backend in self._backends:
            backend.close()


@TRANSFER_BACKENDS.register("auto", traits=("maps_host_memory",))
def make(settings: BackendSettings) -> Backend:
    """Combines ipc, for a host's memory, with nixl, for a network, where its library is installed."""
    backends = [TRANSFER_BACKENDS.get("ipc")(settings)]
    try:
        backends.append(TRANSFER_BACKENDS.get("nixl")(settings))
    except ConfigError as error:
        logger.warning("Pages travel within this host only: %s", error)
    return AutoBackend(backends)
