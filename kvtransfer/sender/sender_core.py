"""The sender's half of the protocol, without I/O: calls, messages and the time go in, effects come out.

A room begins in the lobby (lobby.py), where its halves meet. From then on its life is told here: its writes wait in a
queue (write_queue.py), go over sessions (sessions.py), and must have ended before it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ...common.api.errors import Aborted, ServingError, TransferFailed
from ..failures import count_failure, fail, room_in_use
from ..protocol import messages as m
from ..protocol.states import SENDER, Event, Phase, step
from ..protocol.timing import Timing
from .rendezvous import Rendezvous
from .sender_state import Destination, Dismiss, Effect, SendRoom, Session, Write
from .sessions import Sessions
from .write_queue import WriteQueue


class SenderCore:
    """State of one sender. Not thread-safe; ``effects`` fill up and are carried out by the owner, in order.

    Times are seconds of one monotonic clock. ``bytes_of(write)`` sizes a write, for the counters.
    """

    def __init__(self, info: m.RankInfo, timing: Timing, bytes_of: Callable[[Write], int] = lambda write: 0):
        self.info = info
        self.timing = timing
        self.bytes_of = bytes_of
        self.effects: deque[Effect] = deque()
        self.rooms: dict[int, SendRoom] = {}
        self.watched: dict[int, SendRoom] = {}  # rooms that have ended, and whose Taken is awaited
        self.counters: dict[str, float] = {"kv_bytes_sent": 0, "kv_transfers_done": 0, "kv_transfer_seconds": 0,
                                           "kv_transfer_exposed_seconds": 0, "kv_write_seconds": 0,
                                           "kv_messages_dropped": 0}
        self.sessions = Sessions(info, timing, self.effects)
        self.lobby = Rendezvous(info, timing, self.rooms, self.sessions, self.counters)
        self.queue = WriteQueue(info)

    # -- the scheduler's calls ------------------------------------------------------------------------------------

    def expect(self, room: int, prompt_digest: int, num_prompt_tokens: int, now: float) -> None:
        if room in self.rooms:
            raise room_in_use(room)
        half = SendRoom(room, prompt_digest, num_prompt_tokens, now, now + self.timing.bootstrap_timeout)
        self.rooms[room] = half
        self.lobby.expect(half, now)

    def push(self, room: int, group: int, first: int, src_page_ids: np.ndarray, ready: Any) -> None:
        half = self.rooms[room]
        if half.phase >= Phase.RESERVED:
            assert half.result is None, "push after finish"
            src_page_ids = np.array(src_page_ids, dtype=np.int64)
            for destination in half.destinations:
                self.queue.add(half, destination, group, first, src_page_ids, ready)
        half.phase = step(SENDER, half.phase, Event.WRITE)

    def finish(self, room: int, result: m.PrefillResult, now: float) -> None:
        half = self.rooms[room]
        if half.phase <= Phase.ABORTING:
            return
        assert half.phase in (Phase.RESERVED, Phase.WRITING) and half.result is None, "finish before RESERVED, or twice"
        half.result, half.computed = result, now
        self._settle(half, now)

    def abort(self, room: int, error: ServingError, now: float) -> None:
        if (half := self.rooms.get(room)) is not None:
            self._fail(half, error, now)

    def forget(self, room: int) -> None:
        assert self.rooms[room].phase.terminal, "forget before the room has ended"
        del self.rooms[room]

    def watch(self, room: int) -> None:
        """Instead of ``forget``: the room may be used again, and ``taken`` tells what becomes of the request."""
        half = self.rooms[room]
        self.forget(room)
        self.watched[room] = half

    def taken(self, room: int) -> bool:
        return not self.watched[room].untaken

    def unwatch(self, room: int) -> None:
        del self.watched[room]

    # -- other weights --------------------------------------------------------------------------------------------

    def leave(self, now: float) -> None:
        """End all sessions and let nobody in until ``join``: what this engine computes is going to be something else.
        No room is open."""
        self.sessions.closed = True
        error = TransferFailed("the prefill server's weights are being replaced", cause="weights")
        for session in [*self.sessions.open.values(), *self.sessions.joining.values()]:
            self._end(session, error, now)

    def join(self, info: m.RankInfo) -> None:
        """Let peers in again, who must look us up anew: ``info`` is of another instance."""
        self.info = self.sessions.info = info
        self.sessions.closed = False

    # -- the channel's events -------------------------------------------------------------------------------------

    def receive(self, session_id: bytes, message: m.ToSender, now: float) -> None:
        if isinstance(message, m.Hello):
            self._hello(session_id, message, now)
            return
        session = self.sessions.open.get(session_id)
        if session is None:
            self.counters["kv_messages_dropped"] += 1
            if session_id not in self.sessions.joining and not isinstance(message, m.Bye):
                self.sessions.send(session_id, m.Gone("the prefill server does not know this session"))
            return
        if isinstance(message, m.Reserve):
            self.lobby.reserve(session, message, now)
        elif isinstance(message, m.Abort):
            self._peer_abort(session, message, now)
        elif isinstance(message, m.Decline):
            self.lobby.decline(message, now)
        elif isinstance(message, m.Taken):
            self._taken(session, message)
        elif isinstance(message, m.Pong):
            session.confirm(message.time, now, self.timing.lease)
        else:
            self._end(session, TransferFailed("the decode server shut down", cause="shutdown"), now)

    def landing(self, half: SendRoom) -> list[Destination]:
        """Where to ring when the room's last writes, which are on their way, have landed; call ``announce`` for each.
        Nothing is told twice, nor what is large or has a checksum to wait for."""
        result = half.result
        if half.phase is not Phase.WRITING or half.announced or half.queued or result is None:
            return []
        half.announced = True
        if result.prompt_logprobs is not None or result.hidden_states is not None:
            return []
        return [destination for destination in half.destinations if destination.session.checksum == "off"]

    def announce(self, destination: Destination, result: m.PrefillResult, place: int, value: int) -> None:
        self.sessions.tell(destination.session, m.Landing(
            destination.room, destination.stamp, self.info.instance, result, place, value))

    def written(self, write: Write, ok: bool, now: float, checksum: int = 0) -> None:
        """A write from the queue ended: its bytes are visible at the target, or (not ok) will never be written now.

        ``checksum`` is that of its source pages, to the extent that the session asks for.
        """
        half = write.room
        half.in_flight -= 1
        self.counters["kv_write_seconds"] += self.queue.ended(now)
        if ok:
            write.destination.checksum = (write.destination.checksum + checksum) % 2**64
            self.counters["kv_bytes_sent"] += self.bytes_of(write)
        elif write.session.id in self.sessions.open:
            # The backend's connection is broken and what it had in flight unknown: end it, peers then wait it out.
            self._end(write.session, TransferFailed(
                "writing KV pages to the decode server failed", cause="write_failed"), now)
        self._settle(half, now)

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float, stalled: float = 0.0) -> None:
        """Deadlines and pings. ``stalled``: seconds that we ourselves did not run, which are not the peers' silence."""
        self.sessions.ping(now)
        for session in self.sessions.silent(now, stalled):
            self._end(session, TransferFailed(
                f"the decode server was silent for {self.timing.peer_timeout:g} s", cause="silent"), now)
        self.lobby.tick(now)

    @property
    def idle(self) -> bool:
        """Nothing has a deadline."""
        return not (self.rooms or self.sessions.open or self.sessions.joining or self.lobby)

    def shut_down(self, now: float) -> None:
        for session in list(self.sessions.open.values()):
            self._end(session, TransferFailed("the prefill server shut down", cause="shutdown"), now)
        for half in list(self.rooms.values()):
            self._fail(half, TransferFailed("the prefill server shut down", cause="shutdown"), now)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _hello(self, session_id: bytes, hello: m.Hello, now: float) -> None:
        if self.sessions.knows(session_id):
            self.counters["kv_messages_dropped"] += 1
            return
        if (way := self.sessions.lane_of(session_id, hello)) is None:
            return
        for old in self.sessions.of_instance(hello.info.instance):
            self._end(old, TransferFailed("the decode server opened a new session", cause="connection_lost"), now)
        spare = hello.spare_page if hello.spare_page is not None and 0 <= hello.spare_page < hello.num_pages else None
        session = Session(session_id, hello.info, way, hello.num_pages, now, hello.checksum, spare)
        self.sessions.admit(session, hello.metadata)

    def _taken(self, session: Session, message: m.Taken | m.Abort) -> None:
        for half in (self.rooms.get(message.room), self.watched.get(message.room)):
            if half is not None:
                half.untaken.discard((session.id, message.stamp))

    def _peer_abort(self, session: Session, abort: m.Abort, now: float) -> None:
        if isinstance(abort.error, Aborted):  # the client has left: no other attempt will come
            self._taken(session, abort)
        half = session.rooms.get(abort.room)
        if half is not None and any(d.session is session and d.stamp == abort.stamp for d in half.destinations):
            self._fail(half, abort.error, now, told_by=session)
            return
        self.lobby.withdraw(session, abort, now)
        # A stamp that we do not know, or no longer, is one that we cannot write for.
        self.sessions.send(session.id, m.Stopped(abort.room, abort.stamp))

    def _fail(self, half: SendRoom, error: ServingError, now: float, *, told_by: Session | None = None) -> None:
        if half.phase is Phase.RESERVING:
            self.lobby.fail(half, error, now)
            return
        if not fail(half, SENDER, error):
            return
        for destination in half.destinations:
            if destination.session is not told_by:
                self.sessions.tell(destination.session,
                                   m.Abort(half.room, destination.stamp, error.code, error.message))
        self._settle(half, now)

    def _settle(self, half: SendRoom, now: float) -> None:
        """Bring a room to its end when its writes allow it."""
        if half.in_flight or not half.destinations:
            return
        if half.phase is Phase.ABORTING:
            half.phase = step(SENDER, half.phase, Event.QUIET)
            for destination in half.destinations:
                self.sessions.tell(destination.session, m.Stopped(half.room, destination.stamp))
            self._ended(half)
        elif half.phase >= Phase.RESERVED and half.phase is not Phase.DONE and half.result is not None \
                and not half.queued:
            half.phase = step(SENDER, half.phase, Event.COMPLETE)
            for destination in half.destinations:
                self.sessions.tell(destination.session, m.Result(
                    half.room, destination.stamp, self.info.instance, half.result, destination.checksum))
            self.counters["kv_transfers_done"] += 1
            self.counters["kv_transfer_seconds"] += now - half.began
            self.counters["kv_transfer_exposed_seconds"] += now - half.computed
            self._ended(half)

    def _ended(self, half: SendRoom) -> None:
        for destination in half.destinations:
            destination.session.rooms.pop(half.room, None)
        if half.error is not None:
            count_failure(self.counters, half.error)

    def _end(self, session: Session, error: ServingError, now: float) -> None:
        """End a session: all its rooms fail, and nothing is written to it any more."""
        was_open = self.sessions.close(session, error.message)
        self.lobby.dismiss(session, error, now)
        for half in list(session.rooms.values()):
            self._fail(half, error, now)
        if was_open:
            self.effects.append(Dismiss(session))
