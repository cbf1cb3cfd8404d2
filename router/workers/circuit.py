"""Circuit breakers of workers: one that keeps failing requests gets none for a while, then one at a time.

    closed ── failure_threshold failures in a row within window ──▶ open
    open ── timeout seconds ──▶ half_open
    half_open ── success_threshold successes ──▶ closed,    ── a failure ──▶ open

A failure is a 5xx answer but 503, or none (``retry`` has the table). A 4xx is the client's fault, and a busy worker is
not broken: they count neither way. Failures in a row, not a share of all: at 1,000 requests a second even a worker
that fails one in a hundred does useful work.
"""

from __future__ import annotations

from collections import deque
from typing import Literal

from ..config.circuit import CircuitRules

CircuitState = Literal["closed", "open", "half_open"]


class Circuit:
    """One worker's circuit breaker; on its caller's clock. Events return True where ``admits`` may have changed."""

    __slots__ = ("state", "troubled", "probing", "_rules", "_failures", "_successes", "_opened_at")

    def __init__(self, rules: CircuitRules):
        self._rules = rules
        self._failures: deque[float] = deque(maxlen=rules.failure_threshold)
        self._opened_at = 0.0
        self.reset()

    def __repr__(self) -> str:
        return f"<circuit {self.state} failures={len(self._failures)} successes={self._successes}>"

    def reset(self) -> None:
        """Forgets everything: the worker was restarted, or is new."""
        self.state: CircuitState = "closed"
        self.troubled = False
        """True while a success would change something: on a worker without failures none needs to be recorded."""
        self.probing = False
        """True while a probe of the half-open circuit is under way."""
        self._failures.clear()
        self._successes = 0

    @property
    def admits(self) -> bool:
        """True if the worker may be given a request."""
        return self.state == "closed" or (self.state == "half_open" and not self.probing)

    def record_failure(self, now: float) -> bool:
        """Notes a request that failed by the worker's fault."""
        if not self._rules.enabled or self.state == "open":  # A late failure of an open circuit extends nothing.
            return False
        self.troubled = True
        self._failures.append(now)
        if self.state == "closed":
            full = len(self._failures) == self._rules.failure_threshold
            if not full or now - self._failures[0] > self._rules.window:
                return False
        self.state = "open"
        self.probing = False
        self._opened_at = now
        return True

    def record_success(self) -> bool:
        """Notes a request that the worker answered."""
        if self.state == "open":  # Sent before it opened; the timeout still applies.
            return False
        if self.state == "half_open":
            self._successes += 1
            if self._successes < self._rules.success_threshold:
                return False
        changed = self.state != "closed"
        self.reset()
        return changed

    def try_half_open(self, now: float) -> bool:
        """Changes from open to half-open, if it is time."""
        if self.state != "open" or now - self._opened_at < self._rules.timeout:
            return False
        self.state = "half_open"
        self._successes = 0
        return True
