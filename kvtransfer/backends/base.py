"""Interface of transfer backends: one-sided writes of pages, or blocks of them, from our pool into a peer's.

A backend is used by one thread, the I/O thread of its sender or receiver. The target's process takes no part in a
write: a receiver only registers memory and hands out its metadata.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np


class Region(NamedTuple):
    """Memory of one layer group, whose pages have equal sizes. ``device`` is a GPU's index, or -1 for the host."""

    address: int
    num_bytes: int
    device: int


class WriteState(Enum):
    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


Peer = Any
"""A backend's own handle of a peer."""
Write = Any
"""A backend's own handle of one write."""


PageCounts = int | list[int]
"""The number of pages of each region in a backend's metadata; one number where all have as many."""


def pack_counts(num_pages: Sequence[int]) -> PageCounts:
    return num_pages[0] if len(set(num_pages)) == 1 else list(num_pages)


def unpack_counts(packed: PageCounts, regions: Sequence[object]) -> list[int]:
    return [packed] * len(regions) if isinstance(packed, int) else packed


class BackendSettings(NamedTuple):
    """Facts that backends are made from: ``host`` is the address that peers reach this server at."""

    host: str
    ib_device: str | None


class Backend(Protocol):
    name: str
    quarantine_seconds: float
    """Time for which a write may still arrive that has FAILED or whose peer was removed; 0 where it cannot."""
    scope: str
    """Peers of another scope cannot be reached; "" reaches all. Valid after ``register``."""
    progress_interval: float | None
    """Seconds between calls of ``progress`` while pages may arrive; None: it need not be called."""

    def register(self, regions: Sequence[Region], num_pages: Sequence[int]) -> None:
        """Makes the pools' memory reachable, once: the layer groups of all cache groups, with the number of pages of
        each. Raises ConfigError where the backend cannot."""

    def local_metadata(self) -> bytes:
        """Returns the description that a peer needs to write into our memory. Valid after ``register``."""

    def add_peer(self, metadata: bytes, src_blocks: Sequence[int], dst_blocks: Sequence[int]) -> Peer:
        """Connects to the process that made ``metadata``. Raises TransferFailed where that is impossible.

        Pages of our layer group g are cut into ``src_blocks[g]`` equal blocks, and the peer's into ``dst_blocks[g]``;
        1 is the whole page. Block b of page p has the number ``p * blocks + b``.
        """

    def remove_peer(self, peer: Peer) -> None:
        """Tears the connection down. Writes that are still pending are given up and poll FAILED from now on."""

    def write(self, peer: Peer, src_group: int, src_ids: np.ndarray, dst_group: int, dst_ids: np.ndarray) -> Write:
        """Starts to copy blocks ``src_ids[i]`` of our layer group into blocks ``dst_ids[i]`` of the peer's.

        Both are ``[n]`` int64, n >= 1, within both pools, of blocks of equal size. Raises TransferFailed when nothing
        was started.
        """

    def poll(self, write: Write) -> WriteState:
        """Returns DONE only when the bytes are visible at the target. DONE and FAILED release the handle: it must not
        be polled again."""

    def write_flag(self, peer: Peer, value: int) -> int | None:
        """Writes ``value`` to one of the peer's completion flags once all writes to the peer so far have arrived, and
        returns the flag's number. A later call may overwrite the flag. None: the peer has no flags that we reach."""

    def completion_flags(self) -> np.ndarray | None:
        """Returns the flags that peers write to: ``[flags]`` int64 in our memory, zeros at first. Valid after
        ``register``. None: they cannot."""

    def progress(self) -> None:
        """Runs the transport for a moment at the target, where it has no thread of its own: it sets connections up, and
        over TCP also moves the bytes."""

    def close(self) -> None:
        """Drops all peers and the registration."""
