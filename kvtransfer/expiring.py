"""Entries that wait for a peer until a deadline; their number is limited, so that a peer cannot fill our memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Protocol, TypeVar

MAX_WAITING = 4096
"""Entries of each kind; an entry is a few hundred bytes plus its page ids."""


class Expiring(Protocol):
    @property
    def deadline(self) -> float: ...


K = TypeVar("K", bound=Hashable)
E = TypeVar("E", bound=Expiring)


class ExpiringEntries(OrderedDict[K, E]):
    """Entries in order of arrival, which is also the order of their deadlines."""

    def overdue(self, now: float) -> Iterator[E]:
        """Removes and yields the entries that have passed their deadline, and the oldest ones beyond the limit."""
        while self:
            key, oldest = next(iter(self.items()))
            if oldest.deadline > now and len(self) <= MAX_WAITING:
                return
            del self[key]
            yield oldest
