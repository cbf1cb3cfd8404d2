"""Tracks the senders that may be writing into a transfer's pages, and when they must have stopped.

When a published transfer fails, its pages wait until every writer has drained (see states.py):

* The session works: until the sender answers our Abort with Stopped (or its result crosses the Abort).
* The session is closed (the process ended, or the network is cut): until ``peer_timeout`` after our last Pong, when the
  sender must have torn its writes down (see sessions.py), and ``teardown_seconds`` more. Where the sender itself ended
  the session, it has just torn them down, and ``teardown_seconds`` is enough.
  Where the backend cannot withdraw writes, its ``quarantine_seconds`` are added, unless another instance of the sender
  answers at its address before.
* The session is silent, but its connection exists (the process is stopped): a stopped process may resume in the middle
  of a write at any time, so only its answer, or the end of its connection, frees the pages. Their error is known at
  once.

One assumption remains: what closes the connection of a process *while it is stopped* (a network cut, a dead host) also
breaks the path of its data, so that a write which it had begun cannot continue when it resumes.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Writers:
    """The senders that a transfer was published to, by session. ``pending`` are those that may still be writing; the
    value is the time by which a sender must have drained whose connection is gone, else None."""

    instances: dict[bytes, str] = field(default_factory=dict)
    pending: dict[bytes, float | None] = field(default_factory=dict)

    def add(self, session_id: bytes, instance: str) -> None:
        self.instances[session_id] = instance
        self.pending[session_id] = None

    def mark_disconnected(self, session_id: bytes, drained_at: float) -> None:
        """Records that the connection is gone."""
        self.pending[session_id] = drained_at

    def mark_drained(self, session_id: bytes) -> bool:
        """Records that a sender has drained. Returns whether all have."""
        del self.pending[session_id]
        return not self.pending

    def overdue(self, now: float) -> list[bytes]:
        """Returns the sessions whose senders must have drained by now."""
        return [session_id for session_id, drained_at in self.pending.items()
                if drained_at is not None and now >= drained_at]

    def mark_dead(self, alive: set[str], now: float, quarantine_seconds: float, teardown_seconds: float) -> None:
        """Shortens the wait for instances that are not ``alive``: other instances answer at their address, so they are
        dead, and their hosts send nothing more for them."""
        for session_id, drained_at in self.pending.items():
            if drained_at is not None and self.instances[session_id] not in alive:
                self.pending[session_id] = min(drained_at, max(now, drained_at - quarantine_seconds) + teardown_seconds)
