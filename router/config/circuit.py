"""Flags of the circuit breaker: a worker that fails requests gets none for a while."""

from __future__ import annotations

import dataclasses

from ...common.config.cli import flag
from .checks import at_least_one, positive


@dataclasses.dataclass(frozen=True)
class CircuitRules:
    """Limits of a circuit breaker; ``window`` and ``timeout`` are in seconds, ``enabled`` False keeps all closed."""

    failure_threshold: int = 10
    success_threshold: int = 3
    timeout: float = 60.0
    window: float = 120.0
    enabled: bool = True


@dataclasses.dataclass(frozen=True)
class CircuitArgs:
    cb_failure_threshold: int = flag(
        10, help="failed requests in a row (5xx but 503, or no answer) that open a circuit")
    cb_success_threshold: int = flag(3, help="answered probes that close a circuit again")
    cb_timeout_duration_secs: float = flag(60.0, help="time that an open circuit keeps requests away, before probes")
    cb_window_duration_secs: float = flag(120.0, help="time within which the failures in a row must lie")
    disable_circuit_breaker: bool = flag(False, help="never keep requests from a worker that passes health checks")

    def __post_init__(self) -> None:
        at_least_one(self, "cb_failure_threshold", "cb_success_threshold")
        positive(self, "cb_timeout_duration_secs", "cb_window_duration_secs")

    @property
    def rules(self) -> CircuitRules:
        return CircuitRules(self.cb_failure_threshold, self.cb_success_threshold, self.cb_timeout_duration_secs,
                            self.cb_window_duration_secs, not self.disable_circuit_breaker)
