"""How long clients may take: their limits, and a timer wheel that looks at connections when they are due, not before.

A connection stands in one slot of the wheel. Most that happens to it moves its deadline away, and is not told: it is
found out when the old one comes. So thousands of idle connections cost a look each in --keep-alive-secs, and a request
costs none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Protocol

from ..config.http import HttpArgs

BODY_BYTES_PER_SECOND = 16 * 1024
"""A body that arrives more slowly, all in all, is given up; one of 32 MiB may take 34 minutes."""


@dataclasses.dataclass(frozen=True)
class ClientLimits:
    """Seconds; infinite where there is no limit."""

    header: float = math.inf
    body: float = math.inf
    """And one more for each BODY_BYTES_PER_SECOND that have come."""
    idle: float = math.inf
    unread: float = math.inf

    @classmethod
    def of(cls, args: HttpArgs) -> ClientLimits:
        return cls(*(seconds or math.inf for seconds in (
            args.client_header_timeout_secs, args.client_body_timeout_secs, args.keep_alive_secs,
            args.client_timeout_secs)))

    @property
    def tick(self) -> float:
        """How exactly they are kept."""
        return min(1.0, self.header / 4, self.body / 4, self.idle / 4, self.unread / 4)


class Watched(Protocol):
    """``slot`` is the wheel's; 0 at first."""

    slot: int

    def look(self, now: float) -> float:
        """End what is overdue; returns in how many seconds to look again (infinite: not before ``watch`` is called)."""


class Deadlines:
    """The wheel. ``now`` is the loop's time at the last tick: near enough for what takes seconds, and free to read."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limits: ClientLimits):
        self.limits = limits
        self.now = loop.time()
        self._loop = loop
        self._tick = limits.tick
        self._slots: dict[int, set[Watched]] = {}
        self._next = int(self.now / self._tick) + 1

    def watch(self, item: Watched, seconds: float) -> None:
        """Look at ``item`` in so many seconds at the latest."""
        if seconds == math.inf:
            return
        slot = max(self._next, math.ceil((self.now + seconds) / self._tick) + 1)
        if item.slot:
            if item.slot <= slot:
                return
            self._slots[item.slot].discard(item)
        item.slot = slot
        self._slots.setdefault(slot, set()).add(item)

    def drop(self, item: Watched) -> None:
        if item.slot:
            self._slots[item.slot].discard(item)
            item.slot = 0

    def advance(self) -> None:
        """Look at all that is due by now."""
        self.now = now = self._loop.time()
        last = int(now / self._tick)
        while self._next <= last:
            due = self._slots.pop(self._next, ())
            self._next += 1
            for item in due:
                item.slot = 0
            for item in due:
                self.watch(item, item.look(now))
