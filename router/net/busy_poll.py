"""Busy polling of the sockets instead of sleeping: a whole core for lower latency.

A sleeping process is woken by the kernel, which takes tens of microseconds on most machines, and more where the core
has gone to sleep too. A router that has a core to itself may poll its sockets instead, for a while after
something arrived (as HAProxy's ``busy-polling`` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter


class BusyPoll:
    """Keeps the loop from sleeping until ``seconds`` after the last call of ``heard``."""

    __slots__ = ("_loop", "_seconds", "_now", "_count", "_seen", "_until", "_polling")

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, now: Callable[[], float] = perf_counter):
        self._loop = loop
        self._seconds = seconds
        self._now = now
        self._count = self._seen = 0
        self._until = 0.0
        self._polling = False

    def heard(self) -> None:
        """Notes that data arrived."""
        self._count += 1
        if not self._polling:
            self._polling = True
            self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        """A loop with something to call soon looks at its sockets without waiting, so this is all that it takes."""
        now = self._now()
        if self._count != self._seen:  # The clock is read once an iteration of the loop, not once an arrival.
            self._seen = self._count
            self._until = now + self._seconds
        if now < self._until:
            self._loop.call_soon(self._poll)
        else:
            self._polling = False
