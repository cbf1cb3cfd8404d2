"""Who may be writing into a room's pages, and when they must have stopped.

When a published room fails, its pages wait until the writer is quiet (see states.py):

* The link works: until the sender answers our Abort with Stopped (or its result crosses the Abort).
* The link is closed (the process ended, or the network is cut): until ``peer_timeout`` after our last Pong, when the
  sender must have torn its writes down (see sessions.py), and ``landing`` more. When the sender itself has dismissed
  us, it has just done so, and ``landing`` is enough.
  Where the backend cannot take writes back, for as long as they linger in addition, or until another instance of the
  sender's answers at its address.
* The link is silent, yet its connection stands (the process is stopped): a stopped process may resume in the middle of
  a write at any time, so only its answer, or the end of its connection, frees the pages. Their error is known at once.

One assumption remains: what closes the connection of a process *while it is stopped* (a network cut, a dead host) also
breaks the path of its data, so that a write which it had begun cannot go on when it resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Writers:
    """The senders that a room was published to, by link. ``pending`` are those that have not said that they are quiet
    yet; for one whose connection is gone, with the time when it must be."""

    instances: dict[bytes, str] = field(default_factory=dict)
    pending: dict[bytes, float | None] = field(default_factory=dict)

    def add(self, link_id: bytes, instance: str) -> None:
        self.instances[link_id] = instance
        self.pending[link_id] = None

    def lost(self, link_id: bytes, quiet_at: float) -> None:
        """The connection is gone."""
        self.pending[link_id] = quiet_at

    def stopped(self, link_id: bytes) -> bool:
        """It is quiet. Returns whether all are."""
        del self.pending[link_id]
        return not self.pending

    def overdue(self, now: float) -> list[bytes]:
        """Those that must be quiet by now."""
        return [link_id for link_id, quiet_at in self.pending.items() if quiet_at is not None and now >= quiet_at]

    def outlived(self, alive: set[str], now: float, lingering: float, landing: float) -> None:
        """Where others answer in place of instances, those are dead, and their hosts send no more for them."""
        for link_id, quiet_at in self.pending.items():
            if quiet_at is not None and self.instances[link_id] not in alive:
                self.pending[link_id] = min(quiet_at, max(now, quiet_at - lingering) + landing)
