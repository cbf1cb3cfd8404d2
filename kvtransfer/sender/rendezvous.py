"""Where the halves of a room meet: prefill's own, and a destination from each decode rank that has a lane from here.

They come in any order, and any of them may be withdrawn meanwhile. Destinations that came early, and the rooms that
failed before both halves were there, wait for the bootstrap timeout.
"""

from __future__ import annotations

from typing import NamedTuple

from ...common.api.errors import DeadlineExceeded, ServingError, TransferFailed
from ..expiring import Waiting
from ..failures import count_failure, fail, room_in_use
from ..protocol import messages as m
from ..protocol.reshard import readers_of
from ..protocol.states import SENDER, Phase
from ..protocol.timing import Timing
from .sender_state import Destination, SendRoom, Session
from .sessions import Sessions


class Tombstone(NamedTuple):
    """Why a room failed before its other half came, so that the other fails at once and not by its deadline."""

    error: ServingError
    deadline: float


class Rendezvous:
    """A sender's halves before they join. Nothing of theirs has been written, so they fail at once.

    ``rooms`` and ``counters`` are the core's; those of the rooms that are RESERVING are the lobby's to change.
    """

    def __init__(self, info: m.RankInfo, timing: Timing, rooms: dict[int, SendRoom], sessions: Sessions,
                 counters: dict[str, float]):
        self.info = info
        self.timing = timing
        self.rooms = rooms
        self.sessions = sessions
        self.counters = counters
        self.early: Waiting[tuple[int, int], Destination] = Waiting()  # by room and decode rank
        self.tombstones: Waiting[int, Tombstone] = Waiting()

    def __bool__(self) -> bool:
        return bool(self.early or self.tombstones)

    # -- halves come ----------------------------------------------------------------------------------------------

    def expect(self, half: SendRoom, now: float) -> None:
        """Prefill's half has come: ``half`` joins, fails of what its room has failed of already, or waits."""
        if (tombstone := self.tombstones.pop(half.room, None)) is not None:
            self.fail(half, tombstone.error, now, bury=False)
        else:
            self._join(half, now)

    def reserve(self, session: Session, reserve: m.Reserve, now: float) -> None:
        """A rank of decode's half has come."""
        if reserve.stamp <= session.stamp:  # a receiver's stamps grow: this one has come before
            self.counters["kv_messages_dropped"] += 1
            return
        session.stamp = reserve.stamp
        half, waiting = self.rooms.get(reserve.room), self.early.get((reserve.room, session.info.rank))
        destination = Destination.of(session, reserve, now + self.timing.bootstrap_timeout)
        if (flaw := destination.flaw) is not None:
            self._refuse(destination, TransferFailed(flaw, cause="mismatch"))
        elif waiting is not None or (half is not None and half.destinations):
            self._refuse(destination, room_in_use(reserve.room))
        elif (error := self._error_of(reserve.room)) is not None:
            self._refuse(destination, error)
        else:
            self.early[destination.room, destination.rank] = destination
            if half is not None:
                self._join(half, now)

    def _error_of(self, room: int) -> ServingError | None:
        """Of a room that has failed before it joined. Decode has heard of it with that, and may use the room again."""
        half = self.rooms.get(room)
        if half is not None and half.error is None:
            return None
        tombstone = self.tombstones.pop(room, None)
        if half is not None:
            return half.error
        return None if tombstone is None else tombstone.error

    def _join(self, half: SendRoom, now: float) -> None:
        """Join with the destinations that wait, once each decode rank that has a lane from us has sent one."""
        waiting = self._of_room(half.room)
        if not waiting:
            return
        if (why := next((why for destination in waiting if (why := half.differs(destination)) is not None), None)):
            self.fail(half, TransferFailed(why, cause="mismatch"), now, bury=False)
            return
        readers = readers_of(self.info.rank, self.info.side, waiting[0].session.info.side)
        if sorted(destination.rank for destination in waiting) == readers:
            for destination in waiting:
                self._remove(destination)
            half.join(waiting)

    # -- halves go ------------------------------------------------------------------------------------------------

    def fail(self, half: SendRoom, error: ServingError, now: float, *, bury: bool = True) -> None:
        """End a half that has not joined. ``bury``: its other half is still to come, unless it waits here."""
        assert half.phase is Phase.RESERVING, "it has joined, or failed before"
        fail(half, SENDER, error)
        count_failure(self.counters, error)
        waiting = self._of_room(half.room)
        for destination in waiting:
            self._remove(destination)
            self._refuse(destination, error)
        if bury and not waiting:
            self._bury(half.room, error, now)

    def withdraw(self, session: Session, abort: m.Abort, now: float) -> None:
        """Decode aborts what may be a destination that waits."""
        waiting = self.early.get((abort.room, session.info.rank))
        if waiting is not None and waiting.session is session and waiting.stamp == abort.stamp:
            self._remove(waiting)
            self._abandon(abort.room, abort.error, now)

    def decline(self, decline: m.Decline, now: float) -> None:
        """Decode will not reserve for a room; where somebody has, and it has joined, the word is not about that."""
        half = self.rooms.get(decline.room)
        if half is None or half.phase is Phase.RESERVING:
            self._abandon(decline.room, decline.error, now)

    def dismiss(self, session: Session, error: ServingError, now: float) -> None:
        """The session has ended."""
        for destination in [waiting for waiting in self.early.values() if waiting.session is session]:
            self._remove(destination)
            self._abandon(destination.room, error, now)

    def tick(self, now: float) -> None:
        """Deadlines."""
        timeout = self.timing.bootstrap_timeout
        for half in list(self.rooms.values()):
            if half.phase is Phase.RESERVING and now >= half.deadline:
                self.fail(half, DeadlineExceeded(
                    f"decode did not reserve pages for this request within {timeout:g} s; check that "
                    f"both halves were sent the same bootstrap_room and that decode reaches this server"), now)
        for destination in self.early.overdue(now):
            waited_for = "another rank of decode did not reserve pages for this request" \
                if destination.room in self.rooms else "prefill was not sent its half of this request"
            self._refuse(destination, DeadlineExceeded(
                f"{waited_for} within {timeout:g} s; check that both halves were sent the same bootstrap_room"))
        for _ in self.tombstones.overdue(now):
            pass

    def _abandon(self, room: int, error: ServingError, now: float) -> None:
        """A destination of a room that has not joined is gone: the rest of the room, here or still to come, fails."""
        if (half := self.rooms.get(room)) is not None:
            self.fail(half, error, now, bury=False)
        else:
            self._bury(room, error, now)

    def _bury(self, room: int, error: ServingError, now: float) -> None:
        self.tombstones.pop(room, None)  # a newer one is the last in order
        self.tombstones[room] = Tombstone(error, now + self.timing.bootstrap_timeout)

    def _refuse(self, destination: Destination, error: ServingError) -> None:
        room, stamp = destination.room, destination.stamp
        self.sessions.send(destination.session.id, m.Abort(room, stamp, error.code, error.message))
        self.sessions.send(destination.session.id, m.Stopped(room, stamp))

    def _of_room(self, room: int) -> list[Destination]:
        return [destination for destination in self.early.values() if destination.room == room]

    def _remove(self, destination: Destination) -> None:
        del self.early[destination.room, destination.rank]
