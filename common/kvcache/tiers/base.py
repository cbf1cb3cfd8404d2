"""Interface of a KV tier: a place outside the device's pool that keeps copies of pages, each under a key.

A tier belongs to one rank: each copies its own part of a page, and the ranks agree on what all of them have
(``scheduler/tier_loads.py``). It keeps what it is given until it needs the room; what it has lost is computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..page_keys import PageKey

if TYPE_CHECKING:
    import torch

    from ..pool import KVPool


@dataclass(frozen=True)
class TierContext:
    """Facts that a tier is made from. ``num_bytes``: the memory it may take, as the flag ``flag`` says. With a
    ``draft_pool`` a page is that of both pools: they are stored, loaded and dropped together."""

    pool: KVPool
    num_bytes: int
    flag: str
    draft_pool: KVPool | None = None

    @property
    def groups(self) -> list[torch.Tensor]:
        """The memory of all layer groups, in which a page has one index."""
        return [*self.pool.groups, *(self.draft_pool.groups if self.draft_pool is not None else ())]


@dataclass
class TierCounters:
    """Pages that a tier has copied, and those that it has dropped to make room."""

    stored: int = 0
    loaded: int = 0
    evicted: int = 0


class TierTask(Protocol):
    """A copy between pool and tier, which may be in flight."""

    @property
    def done(self) -> bool:
        """True once work that the device's current stream is given from then on finds the pages loaded, or may
        overwrite the pages that were stored. Never blocks."""

    @property
    def num_pages(self) -> int:
        """The number of leading pages that were copied; final once ``done``."""
        ...

    def wait(self) -> None:
        """Block until the copy is complete for everyone: the host, other streams, and peers that write into pages."""


class KVTier(Protocol):
    """Copies of pages by key. No method blocks on I/O, apart from ``close``."""

    counters: TierCounters

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, over all layer groups of this rank."""

    @property
    def capacity(self) -> int:
        """Pages that it can keep."""

    @property
    def num_pages(self) -> int:
        """Pages that it keeps."""

    def lookup(self, keys: Sequence[PageKey]) -> int:
        """Returns the number of leading ``keys`` whose pages can be loaded now."""
        ...

    def load(self, keys: Sequence[PageKey], page_ids: np.ndarray) -> TierTask:
        """Copies the pages of ``keys`` into the pool's pages ``page_ids``, in order; fewer where it has lost some."""
        ...

    def store(self, keys: Sequence[PageKey], page_ids: np.ndarray) -> TierTask:
        """Copies pages of the pool; those that it keeps already are not copied again, and others may be dropped for
        them. The device's current stream may overwrite the pages as soon as this returns."""
        ...

    def free(self, keys: Sequence[PageKey]) -> None:
        """Drops the pages of ``keys``; those that it does not keep are ignored."""

    def clear(self) -> None:
        """Drops all pages: they are of other weights."""

    def poll(self) -> None:
        """Advances copies in flight; called once a step while there are any."""

    def close(self) -> None:
        """Ends all copies, and gives its memory and files back."""


@dataclass(frozen=True)
class FinishedTask:
    """A copy that was complete when the call returned."""

    num_pages: int
    done: bool = True

    def wait(self) -> None:
        """There is nothing to wait for."""
