"""The storage of ranks that share their host memory with the first of them: that one reads and writes for all.

What has been read is agreed on by all ranks as the minimum of what they report: the others report that all is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from ..page_keys import PageKey
from .storage import StorageCounters


@dataclass(frozen=True)
class AllThere:
    """A query or a read that the first rank makes for this one."""

    count: int
    done: bool = True

    @property
    def num_pages(self) -> int:
        return self.count

    def cancel(self) -> None:
        """There is nothing to cancel."""


class FirstRankStorage:
    """The other ranks' proxy of the first rank's ``Storage``, which has the backend ``name``."""

    healthy = True
    read_rate = 1e15  # bytes a second, above every other rank's
    num_queued_writes = 0
    num_clears = 0

    def __init__(self, name: str):
        self.name = name
        self.counters = StorageCounters()

    def query(self, keys: Sequence[PageKey]) -> AllThere:
        return AllThere(len(keys))

    def read(self, keys: Sequence[PageKey], slots: np.ndarray) -> AllThere:
        return AllThere(len(keys))

    def take_seen(self) -> list[PageKey]:
        return []

    def clear(self) -> Future[None]:
        """The first rank removes the objects."""
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self, drain_seconds: float = 0.0) -> None:
        """There is nothing to close."""
