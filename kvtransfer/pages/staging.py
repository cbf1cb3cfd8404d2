"""Memory through which a rank's pages travel to and from its peers, registered once with a transfer backend."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from ...common.api.errors import ConfigError
from ...common.kvcache.storage.base import QUARANTINE_SECONDS, Cluster, aligned_buffer
from ...common.shared_memory.host import shared_bytes
from ..backends import make_backend
from ..backends.base import Backend, Region

logger = logging.getLogger("baton.kvtransfer")

BLOCK_BYTES = 64 << 10
"""What a descriptor of a write covers: network backends take some microseconds for each."""


def num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


class Staging:
    """``out`` is the page server's, for objects that it sends; the rest are lanes, each for the objects of one call
    that reads. Lanes are safe for threads. A lane whose call failed may still be written by the peer: it is not used
    for a minute, so that nothing is damaged that came by another call (checksums would show it)."""

    def __init__(self, out_bytes: int, lane_bytes: int, num_lanes: int):
        self._num_out, self._lane_blocks = num_blocks(out_bytes), num_blocks(lane_bytes)
        self.num_blocks = self._num_out + num_lanes * self._lane_blocks
        num_bytes = self.num_blocks * BLOCK_BYTES
        try:
            self._memory = shared_bytes(num_bytes)
        except OSError:  # peers on this host cannot map it then
            self._memory = aligned_buffer(num_bytes)
        self.out = self._memory[:self._num_out * BLOCK_BYTES]
        self._lock = threading.Lock()
        self._free = list(range(num_lanes))
        self._retired: deque[tuple[float, int]] = deque()

    def register(self, cluster: Cluster, host: str) -> Backend | None:
        """Makes the cluster's transfer backend for this memory; None where it cannot take it."""
        try:
            backend = make_backend(cluster.transfer_backend, host, cluster.ib_device)
            backend.register([Region(self._memory.ctypes.data, self._memory.nbytes, -1)], [self.num_blocks])
        except ConfigError as error:
            logger.info("Pages of peers' host memory come as messages: %s", error)
            return None
        return backend

    def lease(self) -> int | None:
        """Returns a free lane, for ``release`` or ``retire``; None where there is none."""
        now = time.monotonic()
        with self._lock:
            while self._retired and self._retired[0][0] < now:
                self._free.append(self._retired.popleft()[1])
            return self._free.pop() if self._free else None

    def release(self, lane: int) -> None:
        with self._lock:
            self._free.append(lane)

    def retire(self, lane: int) -> None:
        with self._lock:
            self._retired.append((time.monotonic() + QUARANTINE_SECONDS, lane))

    def place(self, lane: int, sizes: Sequence[int]) -> list[int] | None:
        """Returns the first block of each object of ``sizes`` in a lane; None where they do not fit."""
        ends = np.cumsum([num_blocks(size) for size in sizes])
        if ends[-1] > self._lane_blocks:
            return None
        first = self._num_out + lane * self._lane_blocks
        return [first, *(first + ends[:-1]).tolist()]

    def view(self, block: int, num_bytes: int) -> np.ndarray:
        return self._memory[block * BLOCK_BYTES:][:num_bytes]
