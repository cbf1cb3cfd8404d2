"""Halves whose other half has not come yet: destinations that arrived early, and rooms that failed before they joined.

Both are kept for the bootstrap timeout, and so many at most: a peer that only ever reserves must not fill our memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import NamedTuple, Protocol, TypeVar

from ..common.api.errors import ServingError

MAX_WAITING = 4096  # halves of each kind; one is a few hundred bytes plus its page ids


class Expiring(Protocol):
    @property
    def deadline(self) -> float: ...


K = TypeVar("K", bound=Hashable)
E = TypeVar("E", bound=Expiring)


class Tombstone(NamedTuple):
    """Why a room failed before its other half came, so that the other fails at once and not by its deadline."""

    error: ServingError
    deadline: float


class Lobby(OrderedDict[K, E]):
    """Rooms in order of arrival, which is also the order of their deadlines."""

    def overdue(self, now: float) -> Iterator[E]:
        """Remove and yield what has passed its deadline, and the oldest beyond the limit."""
        while self:
            key, oldest = next(iter(self.items()))
            if oldest.deadline > now and len(self) <= MAX_WAITING:
                return
            del self[key]
            yield oldest
