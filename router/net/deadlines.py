"""Time limits of clients, and a timer wheel that checks connections when their deadline comes, not before.

A connection is in one slot of the wheel. Almost everything that happens to it postpones its deadline, without a call of
the wheel: the new deadline is computed when the old one comes. So thousands of idle connections cost a check each in
--keep-alive-secs, and a request costs none.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Protocol

from ..config.http import HttpArgs

BODY_BYTES_PER_SECOND = 16 * 1024
"""The lowest average rate at which a body may arrive; one of 32 MiB may take 34 minutes."""


@dataclasses.dataclass(frozen=True)
class ClientLimits:
    """Time limits in seconds; infinite if there is no limit."""

    header: float = math.inf
    body: float = math.inf
    """One second is added for each BODY_BYTES_PER_SECOND that have come."""
    idle: float = math.inf
    unread: float = math.inf

    @classmethod
    def of(cls, args: HttpArgs) -> ClientLimits:
        return cls(*(seconds or math.inf for seconds in (
            args.client_header_timeout_secs, args.client_body_timeout_secs, args.keep_alive_secs,
            args.client_timeout_secs)))

    @property
    def tick(self) -> float:
        """Seconds by which a limit may be exceeded."""
        return min(1.0, self.header / 4, self.body / 4, self.idle / 4, self.unread / 4)


class Watched(Protocol):
    """An object with a deadline. ``slot`` belongs to the wheel; 0 at first."""

    slot: int

    def check_deadline(self, now: float) -> float:
        """End what is overdue; returns the seconds until the next check (infinite: not before ``watch`` is called)."""


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
        """Check ``item`` within ``seconds``."""
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
        """Check everything that is due by now."""
        self.now = now = self._loop.time()
        last = int(now / self._tick)
        while self._next <= last:
            due = self._slots.pop(self._next, ())
            self._next += 1
            for item in due:
                item.slot = 0
            for item in due:
                self.watch(item, item.check_deadline(now))
