"""Retries: the outcome of a failed attempt, one table for all relays, and the backoff."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from random import Random

from ..workers.registry import Worker

_MAX_MOVES = 64
"""Busy workers that a request may leave for another one without backoff: in a full cluster of thousands, a request must
not ask every worker."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The consequences of the end of an attempt.

    An outcome that is not retried, or not any more, is relayed: a response as it came, with Retry-After if the workers
    are busy, and a failure below HTTP as an error of the router's.
    """

    retried: bool
    """True if the request may be tried elsewhere, before the first byte of a response or if a stream can continue."""
    excludes: bool = True
    """True if the worker gets the request again only if there is no other."""
    counts: bool = True
    """True if the circuit breaker counts it as the worker's failure."""
    busy: bool = False
    """True if the worker is only busy: the next one is asked at once, and no retry is spent on that."""
    died: bool = False
    """True if the worker, or its engine, died while it had the request, perhaps because of it."""


PASSED_ON = Outcome(retried=False, counts=False)
"""The outcome of a response that is simply relayed: a success, or the client's mistake."""
_BROKEN = Outcome(retried=True)
_BUSY = Outcome(retried=True, counts=False, busy=True)
_TRANSFER = Outcome(retried=True, excludes=False, counts=False)

FAILURES = {
    "connect": _BROKEN,
    "malformed": _BROKEN,
    "lost": Outcome(retried=True, died=True),
    "dead": Outcome(retried=True, died=True),
    "hung": Outcome(retried=True, died=True),
    "stale": Outcome(retried=True, excludes=False, counts=False),
    "removed": Outcome(retried=True, counts=False),
    "failed": Outcome(retried=True, counts=False),
    "silent": Outcome(retried=False),
}
"""Outcomes by ``Failure.reason``, for attempts that failed below HTTP or in the middle of a stream."""

_STATUSES = {408: _BUSY, 429: _BUSY, 503: _BUSY, 500: _BROKEN, 502: _BROKEN, 504: _BROKEN}
"""Outcomes of the statuses that blame the worker, or its load, and not the request."""


def outcome_of(status: int, *, pair: bool = False) -> Outcome:
    """The outcome of a worker's status. In a ``pair``, a worker that reports a failed transfer (502) is seldom to
    blame: its peer may just have died, or been restarted."""
    if status < 400:
        return PASSED_ON
    if pair and status == 502:
        return _TRANSFER
    return _STATUSES.get(status) or (PASSED_ON if status < 500 else Outcome(retried=False))


@dataclasses.dataclass(frozen=True)
class Backoff:
    """Exponential backoff: ``initial * multiplier**k`` seconds up to ``maximum``, times 1 +- ``jitter``."""

    max_retries: int
    initial: float
    maximum: float
    multiplier: float
    jitter: float

    def delay(self, retry: int, rng: Random) -> float:
        """Seconds to wait before retry number ``retry`` (from 0)."""
        # The exponent is capped: 1.5**2000 overflows a float, and --retry-max-retries is the user's.
        base = min(self.initial * self.multiplier ** min(retry, 64), self.maximum)
        return max(0.0, base * (1 + self.jitter * (2 * rng.random() - 1)))


class Retries:
    """One request's retries: their number, the workers that failed it, and the timer of the next one."""

    __slots__ = ("_backoff", "_rng", "_loop", "_timer", "_moves", "spent", "excluded", "accused")

    def __init__(self, backoff: Backoff, rng: Random, loop: asyncio.AbstractEventLoop):
        self._backoff = backoff
        self._rng = rng
        self._loop = loop
        self._timer: asyncio.Handle | None = None
        self._moves = 0
        self.spent = 0
        self.excluded: set[Worker] = set()
        self.accused: list[Worker] = []
        """Workers that answered with an error of their own; it counts once another worker has served the request."""

    @property
    def remain(self) -> bool:
        return self.spent < self._backoff.max_retries

    @property
    def may_move(self) -> bool:
        """True if another worker may be asked instead of a busy one."""
        return self._backoff.max_retries > 0 and self._moves < _MAX_MOVES

    def allows(self, outcome: Outcome) -> bool:
        """True if a request with this outcome may be tried again."""
        return self.may_move if outcome.busy else self.remain

    def schedule(self, start: Callable[[], None]) -> bool:
        """Spend a retry and call ``start`` after its backoff; returns False if there is none."""
        if not self.remain:
            return False
        self._timer = self._loop.call_later(self._backoff.delay(self.spent, self._rng), start)
        self.spent += 1
        return True

    def move(self, start: Callable[[], None]) -> None:
        """Call ``start`` in the next iteration of the loop, for a worker that has not been asked yet."""
        self._moves += 1
        self._timer = self._loop.call_soon(start)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
