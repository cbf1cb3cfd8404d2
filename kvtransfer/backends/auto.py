"""Several backends as one: each peer is reached by the first of them that reaches it.

Between two servers of a host that is mapped memory (ipc), between hosts a network (nixl). Both sides register their
pools with all of theirs, and a peer's metadata has a part for each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...common.api.errors import ConfigError, TransferFailed
from ...common.api.unreadable import UNREADABLE
from .base import Backend, Peer, Region, Write, WriteState

logger = logging.getLogger(__name__)


class _Reached(NamedTuple):
    """A peer, or a write to it, as the backend knows it that reaches it."""

    backend: Backend
    handle: Any


class AutoBackend:
    """``backends``: the nearest first. One that cannot register the pool is left out."""

    name = "auto"
    scope = ""

    def __init__(self, backends: Sequence[Backend]):
        self._backends = list(backends)
        self.lingering = max(backend.lingering for backend in backends)
        intervals = [backend.progress_interval for backend in backends if backend.progress_interval is not None]
        self.progress_interval: float | None = min(intervals, default=None)

    def register(self, regions: Sequence[Region], num_pages: int) -> None:
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
            parts = msgspec.msgpack.decode(metadata, type=dict[str, bytes])
        except UNREADABLE as error:
            raise TransferFailed(f"the peer's description of its memory is unreadable: {error}") from None
        why = TransferFailed(f"the peer's pages travel by {', '.join(parts) or 'nothing'}, and ours by "
                             f"{', '.join(backend.name for backend in self._backends)}", cause="mismatch")
        for backend in self._backends:
            if backend.name in parts:
                try:
                    return _Reached(backend, backend.add_peer(parts[backend.name], src_blocks, dst_blocks))
                except TransferFailed as refused:
                    logger.info("A peer is not reached by %s: %s", backend.name, refused.message)
                    why = refused
        raise why

    def remove_peer(self, peer: Peer) -> None:
        peer.backend.remove_peer(peer.handle)

    def write(self, peer: Peer, src_group: int, src_ids: np.ndarray, dst_group: int, dst_ids: np.ndarray) -> Write:
        return _Reached(peer.backend, peer.backend.write(peer.handle, src_group, src_ids, dst_group, dst_ids))

    def poll(self, write: Write) -> WriteState:
        state: WriteState = write.backend.poll(write.handle)
        return state

    def ring(self, peer: Peer, value: int) -> int | None:
        place: int | None = peer.backend.ring(peer.handle, value)
        return place

    def bells(self) -> np.ndarray | None:
        """Those of the nearest backend that has any."""
        return next((bells for backend in self._backends if (bells := backend.bells()) is not None), None)

    def progress(self) -> None:
        for backend in self._backends:
            backend.progress()

    def close(self) -> None:
        for backend in self._backends:
            backend.close()
