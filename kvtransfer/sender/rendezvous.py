"""Matches prefill's request and decode's destinations, one from each decode rank that this rank writes to, by room.

They arrive in any order, and any of them may be withdrawn meanwhile. Destinations without a request, and the errors of
rooms that failed before both sides were there, are kept until the bootstrap timeout.
"""

from __future__ import annotations

from typing import NamedTuple

from ...common.api.errors import DeadlineExceeded, ServingError, TransferFailed
from ..expiring import ExpiringEntries
from ..failures import count_failure, fail, room_in_use
from ..protocol import messages as m
from ..protocol.reshard import reader_ranks
from ..protocol.states import SENDER, Phase
from ..protocol.timing import Timing
from .sender_state import Destination, SendTransfer, Session
from .sessions import Sessions


class Tombstone(NamedTuple):
    """Error of a room that failed before its other side came, so that that side fails at once and not at its
    deadline."""

    error: ServingError
    deadline: float


class Rendezvous:
    """A sender's transfers before they join. None of their pages has been written, so they fail at once.

    ``transfers`` and ``counters`` are the core's; transfers that are RESERVING are changed here alone.
    """

    def __init__(self, info: m.RankInfo, timing: Timing, transfers: dict[int, SendTransfer], sessions: Sessions,
                 counters: dict[str, float]):
        self.info = info
        self.timing = timing
        self.transfers = transfers
        self.sessions = sessions
        self.counters = counters
        self.unmatched: ExpiringEntries[tuple[int, int], Destination] = ExpiringEntries()  # by room and decode rank
        self.tombstones: ExpiringEntries[int, Tombstone] = ExpiringEntries()

    def __bool__(self) -> bool:
        return bool(self.unmatched or self.tombstones)

    # -- arrivals -------------------------------------------------------------------------------------------------

    def expect(self, transfer: SendTransfer, now: float) -> None:
        """Takes prefill's request: it joins with its destinations, fails with its room's earlier error, or waits."""
        if (tombstone := self.tombstones.pop(transfer.room, None)) is not None:
            self.fail(transfer, tombstone.error, now, add_tombstone=False)
        else:
            self._join(transfer, now)

    def reserve(self, session: Session, reserve: m.Reserve, now: float) -> None:
        """Takes the destination of a decode rank."""
        if reserve.stamp <= session.stamp:  # a receiver's stamps grow: this is a repetition
            self.counters["kv_messages_dropped"] += 1
            return
        session.stamp = reserve.stamp
        transfer, waiting = self.transfers.get(reserve.room), self.unmatched.get((reserve.room, session.info.rank))
        destination = Destination.of(session, reserve, now + self.timing.bootstrap_timeout)
        if (flaw := destination.flaw) is not None:
            self._refuse(destination, TransferFailed(flaw, cause="mismatch"))
        elif waiting is not None or (transfer is not None and transfer.destinations):
            self._refuse(destination, room_in_use(reserve.room))
        elif (error := self._earlier_error(reserve.room)) is not None:
            self._refuse(destination, error)
        else:
            self.unmatched[destination.room, destination.rank] = destination
            if transfer is not None:
                self._join(transfer, now)

    def _earlier_error(self, room: int) -> ServingError | None:
        """Returns the error of a room that failed before it joined. Decode hears it now, and may use the room again."""
        transfer = self.transfers.get(room)
        if transfer is not None and transfer.error is None:
            return None
        tombstone = self.tombstones.pop(room, None)
        if transfer is not None:
            return transfer.error
        return None if tombstone is None else tombstone.error

    def _join(self, transfer: SendTransfer, now: float) -> None:
        """Joins the transfer with its destinations, once each decode rank that we write to has sent one."""
        waiting = self._unmatched_for(transfer.room)
        if not waiting:
            return
        differences = (transfer.find_difference(destination) for destination in waiting)
        if (why := next(filter(None, differences), None)) is not None:
            self.fail(transfer, TransferFailed(why, cause="mismatch"), now, add_tombstone=False)
            return
        readers = reader_ranks(self.info.rank, *m.pair_layouts(self.info, waiting[0].session.info))
        if sorted(destination.rank for destination in waiting) == readers:
            for destination in waiting:
                self._remove(destination)
            transfer.join(waiting)

    # -- withdrawals and failures ---------------------------------------------------------------------------------

    def fail(self, transfer: SendTransfer, error: ServingError, now: float, *, add_tombstone: bool = True) -> None:
        """Fails a transfer that has not joined. ``add_tombstone``: its other side may still come, unless it waits
        here."""
        assert transfer.phase is Phase.RESERVING, "it has joined, or failed before"
        fail(transfer, SENDER, error)
        count_failure(self.counters, error)
        waiting = self._unmatched_for(transfer.room)
        for destination in waiting:
            self._remove(destination)
            self._refuse(destination, error)
        if add_tombstone and not waiting:
            self._add_tombstone(transfer.room, error, now)

    def withdraw(self, session: Session, abort: m.Abort, now: float) -> None:
        """Handles decode's abort of a destination that has not joined; ignores other aborts."""
        waiting = self.unmatched.get((abort.room, session.info.rank))
        if waiting is not None and waiting.session is session and waiting.stamp == abort.stamp:
            self._remove(waiting)
            self._fail_unjoined(abort.room, abort.error, now)

    def decline(self, decline: m.Decline, now: float) -> None:
        """Handles decode's refusal to reserve for a room. A transfer that has joined has another reservation."""
        transfer = self.transfers.get(decline.room)
        if transfer is None or transfer.phase is Phase.RESERVING:
            self._fail_unjoined(decline.room, decline.error, now)

    def drop_session(self, session: Session, error: ServingError, now: float) -> None:
        """Fails the destinations of a session that has ended."""
        for destination in [waiting for waiting in self.unmatched.values() if waiting.session is session]:
            self._remove(destination)
            self._fail_unjoined(destination.room, error, now)

    def tick(self, now: float) -> None:
        """Fails whatever has passed its deadline."""
        timeout = self.timing.bootstrap_timeout
        for transfer in list(self.transfers.values()):
            if transfer.phase is Phase.RESERVING and now >= transfer.deadline:
                self.fail(transfer, DeadlineExceeded(
                    f"decode did not reserve pages for this request within {timeout:g} s; check that "
                    f"both servers were sent the same bootstrap_room and that decode reaches this server"), now)
        for destination in self.unmatched.overdue(now):
            waited_for = "another rank of decode did not reserve pages for this request" \
                if destination.room in self.transfers else "prefill was not sent this request"
            self._refuse(destination, DeadlineExceeded(
                f"{waited_for} within {timeout:g} s; check that both servers were sent the same bootstrap_room"))
        for _ in self.tombstones.overdue(now):
            pass

    def _fail_unjoined(self, room: int, error: ServingError, now: float) -> None:
        """Fails a room that has not joined and lost a destination: its other sides, waiting here or still to come."""
        if (transfer := self.transfers.get(room)) is not None:
            self.fail(transfer, error, now, add_tombstone=False)
        else:
            self._add_tombstone(room, error, now)

    def _add_tombstone(self, room: int, error: ServingError, now: float) -> None:
        self.tombstones.pop(room, None)  # so that the new one is the last in order
        self.tombstones[room] = Tombstone(error, now + self.timing.bootstrap_timeout)

    def _refuse(self, destination: Destination, error: ServingError) -> None:
        room, stamp = destination.room, destination.stamp
        self.sessions.send(destination.session.id, m.Abort(room, stamp, error.wire_code, error.message))
        self.sessions.send(destination.session.id, m.Stopped(room, stamp))

    def _unmatched_for(self, room: int) -> list[Destination]:
        return [destination for destination in self.unmatched.values() if destination.room == room]

    def _remove(self, destination: Destination) -> None:
        del self.unmatched[destination.room, destination.rank]
