"""How often and how soon a request is tried again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from random import Random

from .registry import Worker

RETRYABLE_STATUSES = frozenset((500, 502, 503, 504))
"""Answers that blame the worker, not the request. A 4xx is the client's and is never retried."""


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Exponential backoff: ``initial * multiplier**k`` seconds up to ``longest``, times 1 +- ``jitter``."""

    max_retries: int
    initial: float
    longest: float
    multiplier: float
    jitter: float

    def delay(self, retry: int, rng: Random) -> float:
        """Seconds to wait before retry number ``retry`` (from 0)."""
        # The exponent is capped: 1.5**2000 overflows a float, and --retry-max-retries is the user's.
        base = min(self.initial * self.multiplier ** min(retry, 64), self.longest)
        return max(0.0, base * (1 + self.jitter * (2 * rng.random() - 1)))


class Retries:
    """One request's retries: how many are spent, which workers failed it, and the timer of the next one."""

    __slots__ = ("_backoff", "_rng", "_loop", "_timer", "spent", "excluded")

    def __init__(self, backoff: Backoff, rng: Random, loop: asyncio.AbstractEventLoop):
        self._backoff = backoff
        self._rng = rng
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self.spent = 0
        self.excluded: set[Worker] = set()

    @property
    def left(self) -> bool:
        return self.spent < self._backoff.max_retries

    def schedule(self, start: Callable[[], None]) -> bool:
        """Spend a retry and call ``start`` after its backoff; False when none is left."""
        if not self.left:
            return False
        self._timer = self._loop.call_later(self._backoff.delay(self.spent, self._rng), start)
        self.spent += 1
        return True

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
