"""The sender's half of the protocol, without I/O: calls, messages and the time go in, effects come out.

Leases
------
A receiver that loses us may reuse its pages after a while, so we must not write after that while, however long our
process was stopped or cut off in between. Every Ping carries our time of sending, and its Pong *confirms* the session
as of that time. A Pong that waited in a socket while we were stopped carries an old time, and confirms little.

* A write is posted only within ``lease`` of the last confirmation.
* A session that is not confirmed for ``peer_timeout`` ends, and the backend tears its writes down.

The receiver sends a Pong later than we sent its Ping. So from its last Pong on it need only wait ``peer_timeout``,
and ``landing`` for our own slowness, to be certain that nothing of ours is on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from ..common.api.errors import Aborted, Conflict, DeadlineExceeded, ServingError, TransferFailed
from . import messages as m
from .failures import count_failure
from .lanes import lane, parts_of, readers_of
from .lobby import Lobby, Tombstone
from .send_state import Admit, Destination, Dismiss, Effect, Send, SendRoom, Session, Write
from .states import SENDER, Event, Phase, step
from .timing import Timing


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
        self.sessions: dict[bytes, Session] = {}
        self.joining: dict[bytes, Session] = {}  # admitted by us, not yet by the backend
        self.early: Lobby[tuple[int, int], Destination] = Lobby()  # by room and decode rank
        self.tombstones: Lobby[int, Tombstone] = Lobby()
        self.queue: deque[Write] = deque()
        self.counters: dict[str, float] = {"kv_bytes_sent": 0, "kv_transfers_done": 0, "kv_transfer_seconds": 0,
                                           "kv_transfer_exposed_seconds": 0,
                                           "kv_messages_dropped": 0}
        self._next_ping = 0.0

    # -- the scheduler's calls ------------------------------------------------------------------------------------

    def expect(self, room: int, prompt_digest: int, num_prompt_tokens: int, now: float) -> None:
        if room in self.rooms:
            raise Conflict(_in_use(room))
        half = SendRoom(room, prompt_digest, num_prompt_tokens, now, now + self.timing.bootstrap_timeout)
        self.rooms[room] = half
        if (tombstone := self.tombstones.pop(room, None)) is not None:
            self._fail(half, tombstone.error, now, bury=False)
        else:
            self._join(half, now)

    def push(self, room: int, group: int, first: int, src_page_ids: np.ndarray, ready: Any) -> None:
        half = self.rooms[room]
        if half.phase >= Phase.RESERVED:
            assert half.result is None, "push after finish"
            src_page_ids = np.array(src_page_ids, dtype=np.int64)
            for destination in half.destinations:
                self._queue(half, destination, group, first, src_page_ids, ready)
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

    # -- the channel's events -------------------------------------------------------------------------------------

    def receive(self, session_id: bytes, message: m.ToSender, now: float) -> None:
        if isinstance(message, m.Hello):
            self._hello(session_id, message, now)
            return
        session = self.sessions.get(session_id)
        if session is None:
            self.counters["kv_messages_dropped"] += 1
            if session_id not in self.joining and not isinstance(message, m.Bye):
                self._send(session_id, m.Gone("the prefill server does not know this session"))
            return
        if isinstance(message, m.Reserve):
            self._reserve(session, message, now)
        elif isinstance(message, m.Abort):
            self._peer_abort(session, message, now)
        elif isinstance(message, m.Decline):
            self._declined(message, now)
        elif isinstance(message, m.Taken):
            self._taken(session, message)
        elif isinstance(message, m.Pong):
            confirmed = min(message.time, now)
            session.confirmed = max(session.confirmed, confirmed)
            session.lease = max(session.lease, confirmed + self.timing.lease)
        else:
            self._end(session, TransferFailed("the decode server shut down", cause="shutdown"), now)

    def admitted(self, session: Session, peer: Any, now: float) -> None:
        session.peer, session.confirmed = peer, now
        if self.joining.pop(session.id, None) is None:  # superseded while the backend connected
            self.effects.append(Dismiss(session))
            return
        self.sessions[session.id] = session
        self._send(session.id, m.Welcome(self.info.instance))
        self._send(session.id, m.Ping(now))

    def rejected(self, session: Session, reason: str) -> None:
        if self.joining.pop(session.id, None) is not None:
            self._send(session.id, m.Refused(reason))

    # -- writes ---------------------------------------------------------------------------------------------------

    def take_writes(self, now: float, is_ready: Callable[[Any], bool]) -> list[Write]:
        """Writes to post right now, in the order of their pushes; each must be reported with ``written``."""
        taken, kept = [], deque[Write]()
        while self.queue:
            write = self.queue[0]
            half = write.room
            if half.phase is Phase.WRITING:
                if write.session.lease <= now:
                    kept.append(self.queue.popleft())
                    continue
                if write.ready is not None and not is_ready(write.ready):
                    break  # later events are recorded later
            self.queue.popleft()
            half.queued -= 1
            if half.phase is Phase.WRITING:
                half.in_flight += 1
                taken.append(write)
        kept.extend(self.queue)
        self.queue = kept
        return taken

    def written(self, write: Write, ok: bool, now: float, checksum: int = 0) -> None:
        """A taken write ended: its bytes are visible at the target, or (not ok) will never be written any more.

        ``checksum`` is that of its source pages, to the extent that the session asks for.
        """
        half = write.room
        half.in_flight -= 1
        if ok:
            write.destination.checksum = (write.destination.checksum + checksum) % 2**64
            self.counters["kv_bytes_sent"] += self.bytes_of(write)
        elif write.session.id in self.sessions:
            # The backend's connection is broken and what it had in flight unknown: end it, peers then wait it out.
            self._end(write.session, TransferFailed(
                "writing KV pages to the decode server failed", cause="write_failed"), now)
        self._settle(half, now)

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float, stalled: float = 0.0) -> None:
        """Deadlines and pings. ``stalled``: seconds that we ourselves did not run, which are not the peers' silence."""
        timing = self.timing
        if now >= self._next_ping:
            self._next_ping = now + timing.ping_interval
            for session in self.sessions.values():
                self._send(session.id, m.Ping(now))
        for session in list(self.sessions.values()):
            session.confirmed = min(now, session.confirmed + timing.forgiven(stalled))
            if now - session.confirmed > timing.peer_timeout:
                self._end(session, TransferFailed(
                    f"the decode server was silent for {timing.peer_timeout:g} s", cause="silent"), now)
        for half in list(self.rooms.values()):
            if half.phase is Phase.RESERVING and now >= half.deadline:
                self._fail(half, DeadlineExceeded(
                    f"decode did not reserve pages for this request within {timing.bootstrap_timeout:g} s; check that "
                    f"both halves were sent the same bootstrap_room and that decode reaches this server"), now)
        for destination in self.early.overdue(now):
            waited_for = "another rank of decode did not reserve pages for this request" \
                if destination.room in self.rooms else "prefill was not sent its half of this request"
            self._refuse(destination, DeadlineExceeded(
                f"{waited_for} within {timing.bootstrap_timeout:g} s; check that "
                f"both halves were sent the same bootstrap_room"))
        for _ in self.tombstones.overdue(now):
            pass

    @property
    def idle(self) -> bool:
        """Nothing has a deadline."""
        return not (self.rooms or self.sessions or self.early or self.tombstones)

    def shut_down(self, now: float) -> None:
        for session in list(self.sessions.values()):
            self._end(session, TransferFailed("the prefill server shut down", cause="shutdown"), now)
        for half in list(self.rooms.values()):
            self._fail(half, TransferFailed("the prefill server shut down", cause="shutdown"), now)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _send(self, session_id: bytes, message: m.ToReceiver) -> None:
        self.effects.append(Send(session_id, message))

    def _hello(self, session_id: bytes, hello: m.Hello, now: float) -> None:
        if session_id in self.sessions or session_id in self.joining:
            self.counters["kv_messages_dropped"] += 1
            return
        if hello.expected != self.info.instance:
            self._send(session_id, m.Refused("the prefill server was restarted", restarted=True))
            return
        way = None
        if (why := hello.info.mismatch(self.info)) is None:
            way = lane(self.info.rank, self.info.side, hello.info.rank, hello.info.side)
            why = f"no lane leads from rank {self.info.rank} there to rank {hello.info.rank} here"
        if way is None:
            self._send(session_id, m.Refused(f"prefill and decode do not fit together: {why} (decode, prefill)"))
            return
        for old in [*self.sessions.values(), *self.joining.values()]:
            if old.info.instance == hello.info.instance:
                self._end(old, TransferFailed("the decode server opened a new session", cause="connection_lost"), now)
        session = Session(session_id, hello.info, way, hello.num_pages, now, hello.checksum)
        self.joining[session_id] = session
        self.effects.append(Admit(session, hello.metadata))

    def _queue(self, half: SendRoom, destination: Destination, group: int, first: int, src_page_ids: np.ndarray,
               ready: Any) -> None:
        """What of these pages the destination lacks and its lane carries; in parts, where pages differ in size."""
        way = destination.session.lane
        part = self.info.layout.page_size // way.src_parts
        start, wanted = first * way.src_parts, destination.first_page * way.dst_parts
        skip = max(0, wanted - start)
        src = parts_of(src_page_ids, way.src_parts)[skip:-(-half.num_prompt_tokens // part) - start]
        dst = parts_of(destination.page_ids, way.dst_parts)[start + skip - wanted:][:len(src)]
        assert len(dst) == len(src), "pages beyond the prompt's last"
        if len(src) and way.pieces_of(group):
            half.queued += 1
            self.queue.append(Write(half, destination, group, start + skip, src, dst, ready))

    def _reserve(self, session: Session, reserve: m.Reserve, now: float) -> None:
        room = reserve.room
        half, waiting = self.rooms.get(room), self.early.get((room, session.info.rank))
        joined = [d for d in half.destinations if d.rank == session.info.rank] if half is not None else []
        present = joined[0] if joined else waiting
        if present is not None and (present.session is session and present.stamp == reserve.stamp):
            self.counters["kv_messages_dropped"] += 1
            return
        try:
            page_ids = m.unpack_page_ids(reserve.page_ids)
        except ValueError:
            page_ids = np.empty(0, dtype=np.int64)
        destination = Destination(session, room, reserve.stamp, reserve.prompt_digest, reserve.num_prompt_tokens,
                                  reserve.first_page, page_ids, now + self.timing.bootstrap_timeout)
        if (why := self._unfit(destination)) is not None:
            self._refuse(destination, TransferFailed(why, cause="mismatch"))
        elif present is not None or (half is not None and half.destinations):
            self._refuse(destination, Conflict(_in_use(room)))
        elif half is not None and half.error is not None:
            self.tombstones.pop(room, None)
            self._refuse(destination, half.error)
        elif half is None and (tombstone := self.tombstones.pop(room, None)) is not None:
            self._refuse(destination, tombstone.error)
        else:
            self.early[room, session.info.rank] = destination
            if half is not None:
                self._join(half, now)

    def _unfit(self, destination: Destination) -> str | None:
        pages = destination.session.info.layout.pages_for(destination.num_prompt_tokens)
        ids, first = destination.page_ids, destination.first_page
        if not 0 <= first <= pages or len(ids) != pages - first:
            return f"decode's reservation has {len(ids)} pages from page {first} on for a prompt of {pages} pages"
        if len(ids) and (ids.min() < 0 or ids.max() >= destination.session.num_pages):
            return f"decode's reservation names pages outside its pool of {destination.session.num_pages}"
        return None

    def _refuse(self, destination: Destination, error: ServingError) -> None:
        room, stamp = destination.room, destination.stamp
        self._send(destination.session.id, m.Abort(room, stamp, error.code, error.message))
        self._send(destination.session.id, m.Stopped(room, stamp))

    def _join(self, half: SendRoom, now: float) -> None:
        """Join with the destinations that wait, once each decode rank that has a lane from us has sent one."""
        waiting = [destination for (room, _), destination in self.early.items() if room == half.room]
        for destination in waiting:
            ours = (half.prompt_digest, half.num_prompt_tokens)
            if ours != (destination.prompt_digest, destination.num_prompt_tokens):
                self._fail(half, TransferFailed(
                    f"prefill and decode read different prompts ({half.num_prompt_tokens} and "
                    f"{destination.num_prompt_tokens} tokens); both need the same tokenizer, chat template and "
                    f"request", cause="mismatch"), now, bury=False)
                return
        if not waiting:
            return
        readers = readers_of(self.info.rank, self.info.side, waiting[0].session.info.side)
        if sorted(destination.rank for destination in waiting) != readers:
            return
        for destination in waiting:
            del self.early[half.room, destination.rank]
            destination.session.rooms[half.room] = half
            half.untaken.add((destination.session.id, destination.stamp))
        half.destinations = tuple(waiting)
        half.phase = step(SENDER, half.phase, Event.JOIN)

    def _taken(self, session: Session, message: m.Taken | m.Abort) -> None:
        for half in (self.rooms.get(message.room), self.watched.get(message.room)):
            if half is not None:
                half.untaken.discard((session.id, message.stamp))

    def _peer_abort(self, session: Session, abort: m.Abort, now: float) -> None:
        if abort.code == Aborted.code:  # the client has left: no other attempt will come
            self._taken(session, abort)
        half = session.rooms.get(abort.room)
        waiting = self.early.get((abort.room, session.info.rank))
        if half is not None and any(d.session is session and d.stamp == abort.stamp for d in half.destinations):
            self._fail(half, abort.error, now, told_by=session)
            return
        if waiting is not None and waiting.session is session and waiting.stamp == abort.stamp:
            del self.early[abort.room, session.info.rank]
            self._abandon(abort.room, abort.error, now)
        # A stamp that we do not know, or no longer, is one that we cannot write for.
        self._send(session.id, m.Stopped(abort.room, abort.stamp))

    def _declined(self, decline: m.Decline, now: float) -> None:
        half = self.rooms.get(decline.room)
        if half is None or half.phase is Phase.RESERVING:  # else somebody has reserved, and the word is not about that
            self._abandon(decline.room, decline.error, now)

    def _abandon(self, room: int, error: ServingError, now: float) -> None:
        """A destination of a room that has not joined is gone: the rest of the room, here or still to come, fails."""
        if (half := self.rooms.get(room)) is not None:
            self._fail(half, error, now, bury=False)
        else:
            self._bury(room, error, now)

    def _bury(self, room: int, error: ServingError, now: float) -> None:
        self.tombstones.pop(room, None)
        self.tombstones[room] = Tombstone(error, now + self.timing.bootstrap_timeout)

    def _fail(self, half: SendRoom, error: ServingError, now: float, *, told_by: Session | None = None,
              bury: bool = True) -> None:
        after = step(SENDER, half.phase, Event.FAIL)
        if half.phase is after:
            return
        # Readers take no lock: whoever sees the phase must find the error.
        half.error, half.phase = error, after
        if not half.destinations:
            self._ended(half)
            waiting = [key for key in self.early if key[0] == half.room]
            for key in waiting:
                self._refuse(self.early.pop(key), error)
            if bury and not waiting:
                self._bury(half.room, error, now)
        for destination in half.destinations:
            session = destination.session
            if session is not told_by and session.id in self.sessions:
                self._send(session.id, m.Abort(half.room, destination.stamp, error.code, error.message))
        self._settle(half, now)

    def _settle(self, half: SendRoom, now: float) -> None:
        """Bring a room to its end when its writes allow it."""
        if half.in_flight or not half.destinations:
            return
        if half.phase is Phase.ABORTING:
            half.phase = step(SENDER, half.phase, Event.QUIET)
            for destination in half.destinations:
                if destination.session.id in self.sessions:
                    self._send(destination.session.id, m.Stopped(half.room, destination.stamp))
            self._ended(half)
        elif half.phase >= Phase.RESERVED and half.phase is not Phase.DONE and half.result is not None \
                and not half.queued:
            half.phase = step(SENDER, half.phase, Event.COMPLETE)
            for destination in half.destinations:
                self._send(destination.session.id, m.Result(
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
        known = self.sessions.pop(session.id, None) is not None
        self.joining.pop(session.id, None)
        self._send(session.id, m.Gone(error.message))
        for key, destination in list(self.early.items()):
            if destination.session is session and self.early.pop(key, None) is not None:
                self._abandon(destination.room, error, now)
        for half in list(session.rooms.values()):
            self._fail(half, error, now)
        if known:
            self.effects.append(Dismiss(session))


def _in_use(room: int) -> str:
    return f"bootstrap_room {room} is in use; every request needs a room of its own."
