"""What waits for somebody else to come: until a deadline, and so many at most, lest a peer fill our memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Protocol, TypeVar

MAX_WAITING = 4096  # of each kind; a half is a few hundred bytes plus its page ids


class Expiring(Protocol):
    @property
    def deadline(self) -> float: ...


K = TypeVar("K", bound=Hashable)
E = TypeVar("E", bound=Expiring)


class Waiting(OrderedDict[K, E]):
    """In order of arrival, which is also the order of the deadlines."""

    def overdue(self, now: float) -> Iterator[E]:
        """Remove and yield what has passed its deadline, and the oldest beyond the limit."""
        while self:
            key, oldest = next(iter(self.items()))
            if oldest.deadline > now and len(self) <= MAX_WAITING:
                return
            del self[key]
            yield oldest
