"""Sessions of a sender: the receivers that it may write to, and the leases that limit until when.

Leases
------
A receiver that loses us may reuse its pages after some time, so we must not write after that, however long our process
was stopped or cut off in between. Every Ping carries our time of sending, and its Pong *confirms* the session
as of that time. A Pong that waited in a socket while we were stopped carries an old time, and confirms little.

* A write is posted only within ``lease`` of the last confirmation.
* A session that is not confirmed for ``silence`` ends, and the backend tears its writes down, by ``peer_timeout``.

The receiver sends a Pong later than we sent its Ping. So from its last Pong on it need only wait ``peer_timeout``,
and ``teardown_seconds`` for our own slowness, to be certain that no write of ours is on its way (see writers.py).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from ..notices import Notices
from ..protocol import messages as m
from ..protocol.reshard import ReshardPlan, make_group_plan
from ..protocol.timing import Timing
from .sender_state import Admit, Dismiss, Effect, Send, Session


class Sessions:
    """Sessions by id. The owner decides what becomes of the transfers of a session that ends."""

    def __init__(self, info: m.RankInfo, timing: Timing, effects: deque[Effect]):
        self.info = info
        self.timing = timing
        self.effects = effects
        self.notices = Notices(effects)
        self.open: dict[bytes, Session] = {}
        self.joining: dict[bytes, Session] = {}  # admitted by us, not yet by the backend
        self.closed = False  # while weights are replaced, no receiver is admitted
        self._next_ping = 0.0

    def send(self, session_id: bytes, message: m.ToReceiver) -> None:
        self.effects.append(Send(session_id, message))

    def send_if_open(self, session: Session, message: m.ToReceiver) -> None:
        """Sends the message unless the session has ended: its receiver waits for nothing any more."""
        if session.id in self.open:
            self.send(session.id, message)

    # -- their beginning ------------------------------------------------------------------------------------------

    def contains(self, session_id: bytes) -> bool:
        return session_id in self.open or session_id in self.joining

    def sessions_of(self, instance: str) -> list[Session]:
        """Returns the sessions of one receiver: at most one, and its successor for a moment."""
        return [session for session in (*self.open.values(), *self.joining.values())
                if session.info.instance == instance]

    def plan_for(self, session_id: bytes, hello: m.Hello) -> ReshardPlan | None:
        """Returns the plan for a receiver that says Hello; None where it was refused, with a reason."""
        if self.closed or hello.expected != self.info.instance:
            self.send(session_id, m.Refused("the prefill server was restarted", restarted=True))
            return None
        plan = None
        why = hello.info.mismatch(self.info)
        if len(hello.pools) != len(hello.info.layouts):
            why = f"{len(hello.pools)} pools are named there for {len(hello.info.layouts)} cache groups"
        if why is None:
            ours, theirs = m.pair_layouts(self.info, hello.info)
            plan = make_group_plan(self.info.rank, ours, hello.info.rank, theirs)
            why = f"rank {self.info.rank} there writes nothing to rank {hello.info.rank} here"
        if plan is None:
            sentence = m.describe_mismatch(str(why))
            self.send(session_id, m.Refused(sentence, unfit=True))
            self.notices.warn(f"Decode server {hello.info.server or '(unnamed)'} is refused: {sentence}.")
        return plan

    def admit(self, session: Session, metadata: bytes) -> None:
        """Starts to open a session; ``admitted`` or ``rejected`` follows when the backend has connected."""
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
        """Sends a Ping to all receivers, when it is due."""
        if now >= self._next_ping:
            self._next_ping = now + self.timing.ping_interval
            for session in (*self.open.values(), *self.joining.values()):
                self.send(session.id, m.Ping(now))

    def find_silent(self, now: float, stalled: float) -> list[Session]:
        """Returns the sessions that were not confirmed for ``silence_seconds``; ``stalled`` as in
        ``SenderCore.tick``."""
        for session in self.open.values():
            session.confirmed = min(now, session.confirmed + self.timing.excused(stalled))
        return [session for session in self.open.values() if now - session.confirmed > self.timing.silence_seconds]

    def close(self, session: Session, why: str) -> bool:
        """Ends a session. Returns whether it was open, so that the backend has a connection to tear down."""
        was_open = self.open.pop(session.id, None) is not None
        self.joining.pop(session.id, None)
        self.send(session.id, m.Gone(why))
        return was_open
