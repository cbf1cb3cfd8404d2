"""A sender's sessions: whom it may write to, and until when.

Leases
------
A receiver that loses us may reuse its pages after a while, so we must not write after that while, however long our
process was stopped or cut off in between. Every Ping carries our time of sending, and its Pong *confirms* the session
as of that time. A Pong that waited in a socket while we were stopped carries an old time, and confirms little.

* A write is posted only within ``lease`` of the last confirmation.
* A session that is not confirmed for ``silence`` ends, and the backend tears its writes down, by ``peer_timeout``.

The receiver sends a Pong later than we sent its Ping. So from its last Pong on it need only wait ``peer_timeout``,
and ``landing`` for our own slowness, to be certain that nothing of ours is on its way (see writers.py).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ..notices import Notices
from ..protocol import messages as m
from ..protocol.reshard import ReshardPlan, lane
from ..protocol.timing import Timing
from .sender_state import Admit, Dismiss, Effect, Send, Session


class Sessions:
    """By their ids. What becomes of the rooms of a session that ends is the owner's business."""

    def __init__(self, info: m.RankInfo, timing: Timing, effects: deque[Effect]):
        self.info = info
        self.timing = timing
        self.effects = effects
        self.notices = Notices(effects)
        self.open: dict[bytes, Session] = {}
        self.joining: dict[bytes, Session] = {}  # admitted by us, not yet by the backend
        self.closed = False  # nobody is let in for the time being
        self._next_ping = 0.0

    def send(self, session_id: bytes, message: m.ToReceiver) -> None:
        self.effects.append(Send(session_id, message))

    def tell(self, session: Session, message: m.ToReceiver) -> None:
        """Unless the session has ended: its receiver waits for nothing any more."""
        if session.id in self.open:
            self.send(session.id, message)

    # -- their beginning ------------------------------------------------------------------------------------------

    def knows(self, session_id: bytes) -> bool:
        return session_id in self.open or session_id in self.joining

    def of_instance(self, instance: str) -> list[Session]:
        """All of one receiver: there is one at most, and its successor for a moment."""
        return [session for session in (*self.open.values(), *self.joining.values())
                if session.info.instance == instance]

    def lane_of(self, session_id: bytes, hello: m.Hello) -> ReshardPlan | None:
        """What we have to send to whoever says Hello; None: it was refused, and told why."""
        if self.closed or hello.expected != self.info.instance:
            self.send(session_id, m.Refused("the prefill server was restarted", restarted=True))
            return None
        way = None
        if (why := hello.info.mismatch(self.info)) is None:
            way = lane(self.info.rank, self.info.side, hello.info.rank, hello.info.side)
            why = f"no lane leads from rank {self.info.rank} there to rank {hello.info.rank} here"
        if way is None:
            sentence = m.misfit(str(why))
            self.send(session_id, m.Refused(sentence, unfit=True))
            self.notices.warn(f"Decode server {hello.info.server or '(unnamed)'} is refused: {sentence}.")
        return way

    def admit(self, session: Session, metadata: bytes) -> None:
        """Open it as soon as the backend has connected: ``admitted`` or ``rejected`` follows."""
        self.joining[session.id] = session
        self.effects.append(Admit(session, metadata))

    def admitted(self, session: Session, peer: Any, now: float) -> None:
        session.peer, session.confirmed = peer, now
        if self.joining.pop(session.id, None) is None:  # superseded while the backend connected
            self.effects.append(Dismiss(session))
            return
        self.open[session.id] = session
        self.send(session.id, m.Welcome(self.info.instance))
        self.send(session.id, m.Ping(now))

    def rejected(self, session: Session, reason: str) -> None:
        if self.joining.pop(session.id, None) is not None:
            self.send(session.id, m.Refused(reason))

    # -- their time and end ---------------------------------------------------------------------------------------

    def ping(self, now: float) -> None:
        """All of them, when it is time."""
        if now >= self._next_ping:
            self._next_ping = now + self.timing.ping_interval
            for session in (*self.open.values(), *self.joining.values()):
                self.send(session.id, m.Ping(now))

    def silent(self, now: float, stalled: float) -> list[Session]:
        """Those that were not confirmed for ``silence``; ``stalled``: as in ``SenderCore.tick``."""
        for session in self.open.values():
            session.confirmed = min(now, session.confirmed + self.timing.forgiven(stalled))
        return [session for session in self.open.values() if now - session.confirmed > self.timing.silence]

    def close(self, session: Session, why: str) -> bool:
        """Returns whether it was open, so that the backend has a connection to tear down."""
        was_open = self.open.pop(session.id, None) is not None
        self.joining.pop(session.id, None)
        self.send(session.id, m.Gone(why))
        return was_open
