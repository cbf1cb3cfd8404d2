"""What a storage knows of its backend: how fast it is, and whether it answers.

A backend that fails, or that is much slower than it was, is put aside (a circuit breaker: Nygard, Release It!, 2007):
nobody waits for it, and prompts are computed. After a while it is tried again.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_FIRST_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 60.0
_STALL_FACTOR = 8.0
_RATE_HALF_LIFE_BYTES = 64 << 20


@dataclass
class Measured:
    """A copy in flight. ``num_bytes`` that it has copied, set by who measures."""

    num_bytes: int = 0


class Rate:
    """Bytes per second of what has been copied, by the time in which a copy was in flight; the last 64 MiB count half.
    Safe for threads."""

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._lock = clock, threading.Lock()
        self._active, self._since = 0, 0.0
        self._bytes = self._seconds = 0.0

    @contextmanager
    def measure(self) -> Iterator[Measured]:
        """Times a copy, which may run beside others."""
        measured = Measured()
        with self._lock:
            self._advance()
            self._active += 1
        try:
            yield measured
        finally:
            with self._lock:
                self._advance()
                self._active -= 1
                self._bytes += measured.num_bytes
                if self._bytes > 2 * _RATE_HALF_LIFE_BYTES:
                    self._bytes, self._seconds = self._bytes / 2, self._seconds / 2

    def _advance(self) -> None:
        now = self._clock()
        if self._active:
            self._seconds += now - self._since
        self._since = now

    @property
    def value(self) -> float:
        """0 until something was copied."""
        return self._bytes / self._seconds if self._seconds > 0 else 0.0


class Health:
    """Calls of one kind ("reads", "writes") to a backend. Safe for threads."""

    def __init__(self, name: str, kind: str, clock: Callable[[], float], stall_seconds: float):
        """``name`` is the backend's, for the log. A call that takes longer than ``stall_seconds``, and than 8 times
        what its bytes should take, has stalled."""
        self._name, self._kind, self._clock, self._stall_seconds = name, kind, clock, stall_seconds
        self.rate = Rate(clock)
        self.seconds = 0.0  # in calls, of all threads
        self.times_aside = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, float] = {}  # in flight: when each has stalled
        self._aside_until: float | None = None
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._recovered = clock()

    @contextmanager
    def call(self, num_bytes: int = 0, *, shows_health: bool = True) -> Iterator[None]:
        """Times a call to the backend that copies up to ``num_bytes``. With ``shows_health`` the backend works again
        once it succeeds."""
        number, begin = next(self._numbers), self._clock()
        with self._lock:
            self._calls[number] = begin + self._limit(num_bytes)
        try:
            yield
        finally:
            end = self._clock()
            with self._lock:
                stalled = self._calls.pop(number) < end
                self.seconds += end - begin
        if shows_health and not stalled:
            self._succeeded()

    def _limit(self, num_bytes: int) -> float:
        rate = self.rate.value
        return max(self._stall_seconds, _STALL_FACTOR * num_bytes / rate) if rate else self._stall_seconds

    @property
    def is_aside(self) -> bool:
        """True while nobody should wait for the backend; cheap enough for every step."""
        now = self._clock()
        with self._lock:
            has_stalled = any(limit < now for limit in self._calls.values())
        if has_stalled:
            if self._aside_until is None or self._aside_until <= now:
                self.failed("it does not answer")
            return True
        return self._aside_until is not None and now < self._aside_until

    def failed(self, reason: str) -> None:
        """Puts the backend aside; says so once until it works again. One that soon fails again is put aside longer."""
        with self._lock:
            now = self._clock()
            if self._aside_until is not None and now < self._aside_until:
                return
            if self._aside_until is None:
                if now - self._recovered > _MAX_RETRY_SECONDS:
                    self._retry_seconds = _FIRST_RETRY_SECONDS
                logger.warning("The KV storage %s is put aside for %s, and tried again from time to time: %s",
                               self._name, self._kind, reason)
            self._aside_until = now + self._retry_seconds
            self._retry_seconds = min(2 * self._retry_seconds, _MAX_RETRY_SECONDS)
            self.times_aside += 1

    def _succeeded(self) -> None:
        if self._aside_until is None:
            return
        with self._lock:
            if self._aside_until is not None and self._clock() >= self._aside_until:
                self._aside_until, self._recovered = None, self._clock()
                logger.info("The KV storage %s is used for %s again.", self._name, self._kind)
