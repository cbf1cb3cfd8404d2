"""What a transfer backend does: one-sided writes of pages, or blocks of them, from our pool into a peer's.

A backend is used by one thread, the I/O thread of its sender or receiver. The target's process takes no part in a
write: a receiver only registers memory and hands out its metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np


class Region(NamedTuple):
    """Memory of one layer group: ``num_pages`` pages of equal size. ``device`` is a GPU's index, or -1 for the host."""

    address: int
    num_bytes: int
    device: int


class WriteState(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


Peer = Any  # a backend's own handle of a peer
Write = Any  # a backend's own handle of one write


class Backend(Protocol):
    name: str
    lingering: float
    """Seconds for which a write may still land that has FAILED or whose peer was removed; 0 where it cannot."""
    scope: str
    """Peers of another scope are out of reach; "" reaches everywhere. Valid after ``register``."""
    progress_interval: float | None
    """Seconds between calls of ``progress`` while pages may arrive; None: it need not be called."""

    def register(self, regions: Sequence[Region], num_pages: int) -> None:
        """Make the pool's memory reachable, once. Raises ConfigError where the backend cannot."""

    def local_metadata(self) -> bytes:
        """What a peer needs to write into our memory. Valid after ``register``."""

    def add_peer(self, metadata: bytes, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> Peer:
        """Connect to the process that gave out ``metadata``. Raises TransferFailed where that is impossible.

        Pages of our layer group g are cut into ``src_blocks[g]`` equal blocks, and the peer's into ``dst_blocks[g]``;
        1 is the whole page. Block b of page p has the number ``p * blocks + b``.
        """

    def remove_peer(self, peer: Peer) -> None:
        """Tear the connection down. Writes that are still pending are given up and poll FAILED from now on."""

    def write(self, peer: Peer, src_group: int, src_ids: np.ndarray, dst_group: int, dst_ids: np.ndarray) -> Write:
        """Start to copy blocks ``src_ids[i]`` of our layer group into blocks ``dst_ids[i]`` of the peer's.

        Both are ``[n]`` int64, n >= 1, within both pools, of blocks of equal size. Raises TransferFailed when nothing
        was started.
        """

    def poll(self, write: Write) -> WriteState:
        """DONE only when the bytes are visible at the target. DONE and FAILED release the handle: poll no more."""

    def ring(self, peer: Peer, value: int) -> int | None:
        """Once all that was written to the peer so far has landed, ``value`` stands in one of its bells; returns the
        place of that one. It may be overwritten by a later ring. None: the peer has no bells that we reach."""

    def bells(self) -> np.ndarray | None:
        """Where peers ring: ``[places]`` int64 in our memory, zeros at first. Valid after ``register``. None: they
        cannot."""

    def progress(self) -> None:
        """Give the transport a moment at the target, where it has no thread of its own: connections are set up in it,
        and over TCP also the bytes move."""

    def close(self) -> None:
        """Drop all peers and the registration."""
