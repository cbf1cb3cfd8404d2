"""The receiver's side of the protocol, without I/O: calls, messages and the time go in, effects come out.

A transfer waits for a connection to its sender (connections.py) and is published over it. From then on it is handled
here, until its result has come from every rank, or its pages are safe from all senders that might write into them
(writers.py).
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Sequence

import numpy as np

from ...common.api.errors import DeadlineExceeded, InvalidRequest, PairMismatch, ServingError, TransferFailed
from ..failures import count_failure, fail, room_in_use
from ..notices import Notices
from ..protocol import messages as m
from ..protocol.authentication import SECRET_MISMATCH
from ..protocol.messages import Extent
from ..protocol.states import RECEIVER, Event, Phase, step
from ..protocol.timing import Timing
from .connections import Connections
from .receiver_state import (
    Address,
    Close,
    ConnectAttempt,
    Effect,
    ReceiverSession,
    RecvTransfer,
    ServerConnection,
    Verify,
)


class ReceiverCore:
    """State of one receiver. Not thread-safe; the owner carries ``effects`` out in order.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, info: m.RankInfo, timing: Timing, num_pages: int, metadata: bytes = b"",
                 checksum: Extent = "off", quarantine_seconds: float = 0.0, spare_page: int | None = None,
                 further_pools: tuple[m.FurtherPool, ...] = ()):
        """``quarantine_seconds`` are the backend's."""
        self.info = info
        self.timing = timing
        self.checksum = checksum
        self.quarantine_seconds = quarantine_seconds
        self.effects: deque[Effect] = deque()
        self.transfers: dict[int, RecvTransfer] = {}
        self.connections = Connections(m.Hello(info, "", num_pages, metadata, checksum, spare_page, further_pools),
                                       timing, self.effects,
                                       lambda address: bool(self._waiting(address)) or self._is_attempting(address))
        self.attempts: dict[Address, ConnectAttempt] = {}
        self._notices = Notices(self.effects)
        self.counters: dict[str, float] = {"kv_bytes_received": 0, "kv_transfers_done": 0, "kv_transfer_seconds": 0,
                                           "kv_messages_dropped": 0}
        self._stamps = itertools.count(secrets.randbits(48))

    # -- the scheduler's calls ------------------------------------------------------------------------------------

    def reserve(self, room: int, address: Address, prompt_digest: int, num_prompt_tokens: int, first_page: int,
                page_ids: np.ndarray, now: float, dp_rank: int | None = None,
                further: Sequence[tuple[int, np.ndarray]] = ()) -> None:
        if room in self.transfers:
            raise room_in_use(room)
        pages = self.info.layout.pages_for(num_prompt_tokens)
        assert all(len(ids) == pages - first for first, ids in ((first_page, page_ids), *further)), (
            "one for each missing page")
        reserve = m.Reserve(room, next(self._stamps), prompt_digest, num_prompt_tokens, first_page,
                            m.pack_page_ids(page_ids),
                            tuple(m.PageSpan(first, m.pack_page_ids(ids)) for first, ids in further))
        assert len(reserve.spans) == len(self.info.layouts), "pages in every cache group"
        transfer = self.transfers[room] = RecvTransfer(room, address, reserve, now, dp_rank=dp_rank)
        if (server := self.connections.connection_to(address)) is not None:
            self._publish(transfer, server, now)

    def abort(self, room: int, error: ServingError, now: float) -> None:
        if (transfer := self.transfers.get(room)) is not None:
            if transfer.phase is Phase.RESERVING:
                self.connections.decline(room, transfer.address, error, now)
            self._fail(transfer, error, now)

    def acknowledge(self, room: int) -> None:
        """Acknowledges the first token to the senders of a transfer that is DONE, which then forget the prompt."""
        transfer = self.transfers[room]
        assert transfer.phase is Phase.DONE, "acknowledged before the transfer is done"
        for session_id in transfer.writers.instances:
            self.connections.send_if_open(session_id, m.FirstTokenAck(room, transfer.reserve.stamp))

    def forget(self, room: int) -> None:
        assert self.transfers[room].phase.terminal, "forget before the room has ended"
        del self.transfers[room]

    # -- connections without a transfer ---------------------------------------------------------------------------

    def connect(self, address: Address, now: float) -> None:
        """Connects to a sender before a request needs it; ``attempts`` has the outcome."""
        attempt = self.attempts[address] = ConnectAttempt(now + self.timing.bootstrap_timeout)
        attempt.done = self.connections.connection_to(address) is not None

    def leave(self, now: float) -> None:
        """Ends all sessions, since our weights change. Requires that no transfer is open."""
        self.connections.close()
        for address in {*self.attempts, *self.connections.lookups}:
            self.connections.drop_lookup(address)
            self._fail_waiting(address, TransferFailed("the decode server's weights are being replaced",
                                                       cause="weights"), now)

    def join(self, info: m.RankInfo) -> None:
        """Introduces ourselves by ``info`` from now on."""
        self.info = info
        self.connections.set_info(info)

    def _is_attempting(self, address: Address) -> bool:
        return address in self.attempts and not self.attempts[address].done

    # -- results of lookups ---------------------------------------------------------------------------------------

    def connect_to_ranks(self, address: Address, ranks: Sequence[m.RankInfo], now: float) -> None:
        """Connects to the ranks of the server at ``address``, given in order."""
        for transfer in self.transfers.values():
            if transfer.address == address and transfer.phase is Phase.ABORTING:
                transfer.writers.mark_dead({rank.instance for rank in ranks}, now, self.quarantine_seconds,
                                           self.timing.teardown_seconds)
        if (error := self.connections.connect(address, ranks, now)) is not None:
            self._fail_waiting(address, error, now)

    def unreachable(self, address: Address, reason: str, now: float) -> None:
        """Records that no server answers at ``address``."""
        if (error := self.connections.unreachable(address, reason, now)) is not None:
            self._fail_waiting(address, error, now)

    def refused(self, address: Address, reason: str, now: float) -> None:
        """Fails what waits for a bootstrap server that will never answer us."""
        self.connections.drop_lookup(address)
        self._fail_waiting(address, PairMismatch(
            f"the prefill server at {address[0]}:{address[1]} is not of this cluster: {reason}", cause="refused"), now)

    # -- the channel's events -------------------------------------------------------------------------------------

    def unreadable(self, session_id: bytes, now: float, *, unauthenticated: bool) -> None:
        """Counts a message that cannot be read; ``unauthenticated``: its authentication code is missing or wrong."""
        self.counters["kv_messages_dropped"] += 1
        session = self.connections.sessions.get(session_id)
        if unauthenticated and session is not None and not session.welcome:
            self._on_refused(session, m.Refused(SECRET_MISMATCH, unfit=True), now)

    def receive(self, session_id: bytes, message: m.ToReceiver, now: float) -> None:
        session = self.connections.sessions.get(session_id)
        if session is None:
            self.counters["kv_messages_dropped"] += 1
            return
        session.heard = now
        if isinstance(message, m.Ping):
            if not session.silent:  # else a Pong would confirm a session that we have given up
                session.last_pong = now
                self.connections.send(session, m.Pong(message.time))
        elif isinstance(message, m.Welcome):
            self._on_welcome(session, message, now)
        elif isinstance(message, m.Refused):
            self._on_refused(session, message, now)
        elif isinstance(message, m.Gone):
            error = TransferFailed(f"the prefill server ended the session: {message.message}", cause="ended")
            self._end_session(session, error, now, drained_at=now + self.timing.teardown_seconds)
            self.effects.append(Close(session.id))
        else:
            self._on_transfer_message(session, message, now)

    def disconnected(self, session_id: bytes, now: float) -> None:
        """Ends a session whose connection is closed; the owner has no socket for it any more."""
        if (session := self.connections.sessions.get(session_id)) is None:
            return
        error = TransferFailed("the connection to the prefill server was lost", cause="connection_lost")
        torn_down_at = max(now, session.last_pong + self.timing.peer_timeout)
        was_current = self.connections.is_current(session)
        self._end_session(session, error, now, drained_at=torn_down_at + self.timing.teardown_seconds)
        if was_current and not session.welcome and self.connections.is_needed(session.address):
            self.unreachable(session.address, "its engine does not accept connections", now)

    def check_flags(self, transfer: RecvTransfer, flags: np.ndarray, now: float) -> None:
        """Completes the transfer where the flags say that its last pages have arrived, ahead of its Result: see
        messages.EarlyResult."""
        for session_id, early in transfer.take_completed(flags):
            session = self.connections.sessions.get(session_id)
            if transfer.phase is Phase.RESERVED and session is not None and transfer.room in session.transfers:
                session.completed_early.add(early.stamp)
                transfer.accept(early.result)
                self._on_drained(transfer, session_id, now)

    def verified(self, transfer: RecvTransfer, matches: bool, now: float) -> None:
        """Completes or fails a transfer whose pages were compared with the sender's. Its result has proven that nothing
        is written any more."""
        if transfer.phase.terminal:
            return
        if not matches:
            self._fail(transfer, TransferFailed(
                "the KV cache arrived damaged: its checksum differs from the prefill server's", cause="damaged"), now)
        self._completed(transfer, now)

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float, stalled: float = 0.0) -> None:
        """Handles deadlines. ``stalled``: seconds in which we did not run, which are not the peers' silence."""
        for session in list(self.connections.sessions.values()):
            session.heard = min(now, session.heard + self.timing.excused(stalled))
            if not session.silent and now - session.heard > self.timing.silence_seconds:
                self._give_up(session, now)
            self.connections.close_unused(session)
        for transfer in list(self.transfers.values()):
            self._check_deadlines(transfer, now)
        for address, attempt in self.attempts.items():
            if not attempt.done and now >= attempt.deadline:
                lookup = self.connections.lookups.get(address)
                attempt.done, attempt.error = True, DeadlineExceeded(
                    f"decode could not connect to the prefill server at {address[0]}:{address[1]} within "
                    f"{self.timing.bootstrap_timeout:g} s" + (f": {lookup.reason}" if lookup else ""))
        self.connections.tick(now)

    @property
    def idle(self) -> bool:
        """True where nothing has a deadline."""
        return not (self.transfers or self.connections)

    def shut_down(self, now: float) -> None:
        """Fails all transfers and ends all sessions. Our memory goes away with us, so nothing waits for the writers."""
        for transfer in list(self.transfers.values()):
            self._fail(transfer, TransferFailed("the decode server shut down", cause="shutdown"), now)
        self.connections.close()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _waiting(self, address: Address) -> list[RecvTransfer]:
        return [transfer for transfer in self.transfers.values()
                if transfer.phase is Phase.RESERVING and transfer.address == address]

    def _fail_waiting(self, address: Address, error: ServingError, now: float) -> None:
        self.connections.drop_declines(address)
        if isinstance(error, PairMismatch):
            self._notices.warn(f"Prefill server {address[0]}:{address[1]} is not used: {error.message}.")
        if self._is_attempting(address):
            self.attempts[address].done, self.attempts[address].error = True, error
        for transfer in self._waiting(address):
            self._fail(transfer, error, now)

    def _publish(self, transfer: RecvTransfer, server: ServerConnection, now: float) -> None:
        sessions = server.sessions_for(transfer)
        if not sessions:
            self._fail(transfer, InvalidRequest(
                f"The prefill server has no data-parallel rank {transfer.dp_rank}, only {server.dp_size} of them.",
                param="disagg_prefill_dp_rank"), now)
            return
        transfer.publish(server, sessions)
        for session in sessions:
            self.connections.send(session, transfer.reserve)

    def _on_welcome(self, session: ReceiverSession, welcome: m.Welcome, now: float) -> None:
        if session.silent or welcome.instance != session.instance:
            self.counters["kv_messages_dropped"] += 1
        elif not self.connections.is_current(session):
            session.retired = True
        elif (server := self.connections.add_welcomed(session)) is not None:
            if self._is_attempting(session.address):
                self.attempts[session.address].done = True
            for transfer in self._waiting(session.address):
                self._publish(transfer, server, now)
            self.connections.send_declines(session.address, server)

    def _on_refused(self, session: ReceiverSession, refused: m.Refused, now: float) -> None:
        error = (PairMismatch if refused.unfit else TransferFailed)(refused.message, cause="refused")
        if not refused.restarted and self.connections.is_current(session):
            self._fail_waiting(session.address, error, now)
        self._end_session(session, error, now, drained_at=now)
        self.effects.append(Close(session.id))

    def _on_transfer_message(self, session: ReceiverSession, message: m.EarlyResult | m.Result | m.Abort | m.Stopped,
                             now: float) -> None:
        transfer = session.transfers.get(message.room)
        if message.stamp in session.completed_early:  # its transfer is DONE already
            if not isinstance(message, m.Abort):
                session.completed_early.remove(message.stamp)
        elif transfer is None or transfer.reserve.stamp != message.stamp:
            self.counters["kv_messages_dropped"] += 1
        elif isinstance(message, m.Abort):
            self._fail(transfer, message.error, now, reported_by=session.id)
        elif isinstance(message, m.Stopped):
            if transfer.phase is Phase.RESERVED:
                self._fail(transfer, TransferFailed("the prefill server stopped writing"), now, reported_by=session.id)
            self._on_drained(transfer, session.id, now)
        elif message.instance != session.instance:
            self.counters["kv_messages_dropped"] += 1
        elif isinstance(message, m.EarlyResult):
            if self.checksum == "off":
                transfer.early_results[session.id] = message
        else:
            transfer.accept(message.result, message.checksum)
            self._on_drained(transfer, session.id, now)

    def _on_drained(self, transfer: RecvTransfer, session_id: bytes, now: float) -> None:
        """Records that nothing is written over a session any more; when that is true of all sessions, the transfer
        ends."""
        if (session := self.connections.sessions.get(session_id)) is not None:
            session.transfers.pop(transfer.room, None)
        if not transfer.writers.mark_drained(session_id):
            return
        if transfer.phase is Phase.ABORTING:
            transfer.phase = step(RECEIVER, transfer.phase, Event.DRAINED)
            self._count_end(transfer, now)
        elif self.checksum == "off":
            self._completed(transfer, now)
        else:
            self.effects.append(Verify(transfer))

    def _completed(self, transfer: RecvTransfer, now: float) -> None:
        transfer.phase = step(RECEIVER, transfer.phase, Event.COMPLETE)
        self._count_end(transfer, now)

    def _end_session(self, session: ReceiverSession, error: ServingError, now: float, *, drained_at: float) -> None:
        """Ends a session whose connection is gone. Published transfers wait until ``drained_at`` and for the backend's
        quarantine; the others try a new session."""
        self.connections.remove(session, now)
        for transfer in list(session.transfers.values()):
            transfer.writers.mark_disconnected(session.id, drained_at + self.quarantine_seconds)
            self._fail(transfer, error, now, reported_by=session.id)

    def _give_up(self, session: ReceiverSession, now: float) -> None:
        session.silent = True
        error = TransferFailed(f"the prefill server was silent for {self.timing.peer_timeout:g} s", cause="silent")
        for transfer in list(session.transfers.values()):
            self._fail(transfer, error, now)
        if not session.welcome and self.connections.is_current(session):  # it never answered: no live sender is there
            self._fail_waiting(session.address, error, now)
        self.connections.detach(session, now)

    def _check_deadlines(self, transfer: RecvTransfer, now: float) -> None:
        lookup = self.connections.lookups.get(transfer.address)
        if (error := transfer.overdue(now, self.timing, "" if lookup is None else lookup.reason)) is not None:
            self._fail(transfer, error, now)
        elif transfer.phase is Phase.ABORTING:
            for session_id in transfer.writers.overdue(now):
                self._on_drained(transfer, session_id, now)

    def _fail(self, transfer: RecvTransfer, error: ServingError, now: float, *,
              reported_by: bytes | None = None) -> None:
        if not fail(transfer, RECEIVER, error):
            return
        if transfer.phase is Phase.FAILED:
            self._count_end(transfer, now)
        for session_id in transfer.writers.pending:
            if session_id != reported_by:
                self.connections.send_if_open(session_id, m.Abort(transfer.room, transfer.reserve.stamp,
                                                                  error.wire_code, error.message))

    def _count_end(self, transfer: RecvTransfer, now: float) -> None:
        if transfer.phase is Phase.DONE:
            self.counters["kv_bytes_received"] += sum(len(span.page_ids) // 4 * layout.page_bytes
                                                      for layout, span in transfer.pages_of(self.info))
            self.counters["kv_transfers_done"] += 1
            self.counters["kv_transfer_seconds"] += now - transfer.began
        else:
            assert transfer.error is not None
            count_failure(self.counters, transfer.error)
