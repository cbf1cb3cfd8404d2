"""Times of the transfer protocol in seconds, all derived from three settings."""

from __future__ import annotations

from dataclasses import dataclass

from ...common.config.server import DisaggregationArgs


@dataclass(frozen=True)
class Timing:
    bootstrap_timeout: float
    transfer_timeout: float
    peer_timeout: float

    @classmethod
    def of(cls, args: DisaggregationArgs) -> Timing:
        return cls(args.disaggregation_bootstrap_timeout, args.kv_transfer_timeout, args.peer_timeout)

    @property
    def ping_interval(self) -> float:
        return self.peer_timeout / 6

    @property
    def silence_seconds(self) -> float:
        """Silence of a peer that counts as its death. Ticks notice it late, yet within ``peer_timeout``."""
        return self.peer_timeout - 2 * self.tick

    @property
    def lease(self) -> float:
        """Time after a Ping for which its Pong allows writes; three pings may be late before writing pauses."""
        return self.peer_timeout / 2

    @property
    def teardown_seconds(self) -> float:
        """Time for which a write may still arrive once the sender must have torn it down: the rest of the quarantine.

        It covers the sender's tick and the backend's teardown, which take some tens of milliseconds.
        """
        return self.peer_timeout / 6

    def excused(self, stalled: float) -> float:
        """Returns how much of our own lateness to subtract from a peer's silence: not jitter, whose sum would hide real
        silence."""
        return stalled if stalled >= self.ping_interval else 0.0

    @property
    def tick(self) -> float:
        return min(0.05, self.ping_interval / 2)
