"""The sender's side of the protocol, without I/O: calls, messages and the time go in, effects come out.

A transfer begins in the rendezvous (rendezvous.py), which matches it with its destinations. From then on it is handled
here: its writes wait in a queue (write_queue.py), are posted over sessions (sessions.py), and end before the transfer
does.
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
from .sender_state import Destination, Dismiss, Effect, SendTransfer, Session, Write
from .sessions import Sessions
from .write_queue import WriteQueue


class SenderCore:
    """State of one sender. Not thread-safe; the owner carries ``effects`` out in order.

    Times are seconds of one monotonic clock. ``bytes_of(write)`` returns the size of a write, for the counters.
    """

    def __init__(self, info: m.RankInfo, timing: Timing, bytes_of: Callable[[Write], int] = lambda write: 0):
        self.info = info
        self.timing = timing
        self.bytes_of = bytes_of
        self.effects: deque[Effect] = deque()
        self.transfers: dict[int, SendTransfer] = {}
        self.awaiting_ack: dict[int, SendTransfer] = {}  # ended, without first-token acknowledgement
        self.counters: dict[str, float] = {"kv_bytes_sent": 0, "kv_transfers_done": 0, "kv_transfer_seconds": 0,
                                           "kv_transfer_exposed_seconds": 0, "kv_write_seconds": 0,
                                           "kv_messages_dropped": 0}
        self.sessions = Sessions(info, timing, self.effects)
        self.rendezvous = Rendezvous(info, timing, self.transfers, self.sessions, self.counters)
        self.queue = WriteQueue(info)

    # -- the scheduler's calls ------------------------------------------------------------------------------------

    def expect(self, room: int, prompt_digest: int, num_prompt_tokens: int, now: float) -> None:
        if room in self.transfers:
            raise room_in_use(room)
        transfer = SendTransfer(room, prompt_digest, num_prompt_tokens, now, now + self.timing.bootstrap_timeout)
        self.transfers[room] = transfer
        self.rendezvous.expect(transfer, now)

    def push(self, room: int, group: int, first: int, src_page_ids: np.ndarray, ready: Any) -> None:
        transfer = self.transfers[room]
        if transfer.phase >= Phase.RESERVED:
            assert transfer.result is None, "push after finish"
            src_page_ids = np.array(src_page_ids, dtype=np.int64)
            for destination in transfer.destinations:
                self.queue.add(transfer, destination, group, first, src_page_ids, ready)
        transfer.phase = step(SENDER, transfer.phase, Event.WRITE)

    def finish(self, room: int, result: m.PrefillResult, now: float) -> None:
        transfer = self.transfers[room]
        if transfer.phase <= Phase.ABORTING:
            return
        assert transfer.phase in (Phase.RESERVED, Phase.WRITING), "finish before RESERVED"
        assert transfer.result is None, "finish twice"
        transfer.result, transfer.computed = result, now
        self._finish_if_drained(transfer, now)

    def abort(self, room: int, error: ServingError, now: float) -> None:
        if (transfer := self.transfers.get(room)) is not None:
            self._fail(transfer, error, now)

    def forget(self, room: int) -> None:
        assert self.transfers[room].phase.terminal, "forget before the room has ended"
        del self.transfers[room]

    def await_ack(self, room: int) -> None:
        """Drops a transfer as ``forget`` does, but keeps listening for its first-token acknowledgement."""
        transfer = self.transfers[room]
        self.forget(room)
        self.awaiting_ack[room] = transfer

    def is_acknowledged(self, room: int) -> bool:
        return not self.awaiting_ack[room].unacknowledged

    def stop_awaiting_ack(self, room: int) -> None:
        del self.awaiting_ack[room]

    # -- replacement of weights -----------------------------------------------------------------------------------

    def leave(self, now: float) -> None:
        """Ends all sessions and admits no receiver until ``join``, since this engine's weights change. Requires that no
        transfer is open."""
        self.sessions.closed = True
        error = TransferFailed("the prefill server's weights are being replaced", cause="weights")
        for session in [*self.sessions.open.values(), *self.sessions.joining.values()]:
            self._end_session(session, error, now)

    def join(self, info: m.RankInfo) -> None:
        """Admits receivers again. They must look us up anew: ``info`` has another instance."""
        self.info = self.sessions.info = info
        self.sessions.closed = False

    # -- the channel's events -------------------------------------------------------------------------------------

    def receive(self, session_id: bytes, message: m.ToSender, now: float) -> None:
        if isinstance(message, m.Hello):
            self._on_hello(session_id, message, now)
            return
        session = self.sessions.open.get(session_id)
        if session is None:
            self.counters["kv_messages_dropped"] += 1
            if session_id not in self.sessions.joining and not isinstance(message, m.Bye):
                self.sessions.send(session_id, m.Gone("the prefill server does not know this session"))
            return
        if isinstance(message, m.Reserve):
            self.rendezvous.reserve(session, message, now)
        elif isinstance(message, m.Abort):
            self._on_abort(session, message, now)
        elif isinstance(message, m.Decline):
            self.rendezvous.decline(message, now)
        elif isinstance(message, m.FirstTokenAck):
            self._on_ack(session, message)
        elif isinstance(message, m.Pong):
            session.confirm(message.time, now, self.timing.lease)
        else:
            self._end_session(session, TransferFailed("the decode server shut down", cause="shutdown"), now)

    def early_completion_targets(self, transfer: SendTransfer) -> list[Destination]:
        """Returns the destinations whose completion flags are to be written after the transfer's last writes, which are
        in flight; ``send_early_result`` must follow for each. A result is sent early at most once, and not where it is
        large or must wait for a checksum."""
        result = transfer.result
        if transfer.phase is not Phase.WRITING or transfer.early_result_sent or transfer.queued or result is None:
            return []
        transfer.early_result_sent = True
        if any(large is not None for large in (result.prompt_logprobs, result.hidden_states, result.routed_experts)):
            return []
        return [destination for destination in transfer.destinations if destination.session.checksum == "off"]

    def send_early_result(self, destination: Destination, result: m.PrefillResult, flag: int, value: int) -> None:
        self.sessions.send_if_open(destination.session, m.EarlyResult(
            destination.room, destination.stamp, self.info.instance, result, flag, value))

    def written(self, write: Write, ok: bool, now: float, checksum: int = 0) -> None:
        """Records the end of a write from the queue: its bytes are visible at the target, or (not ok) never will be.

        ``checksum`` is that of its source pages, to the extent that the session asks for.
        """
        transfer = write.transfer
        transfer.in_flight -= 1
        self.counters["kv_write_seconds"] += self.queue.end_write(now)
        if ok:
            write.destination.checksum = (write.destination.checksum + checksum) % 2**64
            self.counters["kv_bytes_sent"] += self.bytes_of(write)
        elif write.session.id in self.sessions.open:
            # The backend's connection is broken, and which writes are in flight is unknown. Receivers wait them out.
            self._end_session(write.session, TransferFailed(
                "writing KV pages to the decode server failed", cause="write_failed"), now)
        self._finish_if_drained(transfer, now)

    # -- time -----------------------------------------------------------------------------------------------------

    def tick(self, now: float, stalled: float = 0.0) -> None:
        """Handles deadlines and pings. ``stalled``: seconds in which we did not run, which are not the peers'
        silence."""
        self.sessions.ping(now)
        for session in self.sessions.find_silent(now, stalled):
            self._end_session(session, TransferFailed(
                f"the decode server was silent for {self.timing.peer_timeout:g} s", cause="silent"), now)
        self.rendezvous.tick(now)

    @property
    def idle(self) -> bool:
        """True where nothing has a deadline."""
        return not (self.transfers or self.sessions.open or self.sessions.joining or self.rendezvous)

    def shut_down(self, now: float) -> None:
        for session in list(self.sessions.open.values()):
            self._end_session(session, TransferFailed("the prefill server shut down", cause="shutdown"), now)
        for transfer in list(self.transfers.values()):
            self._fail(transfer, TransferFailed("the prefill server shut down", cause="shutdown"), now)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _on_hello(self, session_id: bytes, hello: m.Hello, now: float) -> None:
        if self.sessions.contains(session_id):
            self.counters["kv_messages_dropped"] += 1
            return
        if (plan := self.sessions.plan_for(session_id, hello)) is None:
            return
        for old in self.sessions.sessions_of(hello.info.instance):
            error = TransferFailed("the decode server opened a new session", cause="connection_lost")
            self._end_session(old, error, now)
        session = Session(session_id, hello.info, plan, hello.pools, now, hello.checksum)
        self.sessions.admit(session, hello.metadata)

    def _on_ack(self, session: Session, message: m.FirstTokenAck | m.Abort) -> None:
        for transfer in (self.transfers.get(message.room), self.awaiting_ack.get(message.room)):
            if transfer is not None:
                transfer.unacknowledged.discard((session.id, message.stamp))

    def _on_abort(self, session: Session, abort: m.Abort, now: float) -> None:
        if isinstance(abort.error, Aborted):  # the client has disconnected: no other attempt will come
            self._on_ack(session, abort)
        transfer = session.transfers.get(abort.room)
        if transfer is not None and any(d.session is session and d.stamp == abort.stamp for d in transfer.destinations):
            self._fail(transfer, abort.error, now, reported_by=session)
            return
        self.rendezvous.withdraw(session, abort, now)
        # No write of ours is for a stamp that we do not know, or no longer.
        self.sessions.send(session.id, m.Stopped(abort.room, abort.stamp))

    def _fail(self, transfer: SendTransfer, error: ServingError, now: float, *,
              reported_by: Session | None = None) -> None:
        if transfer.phase is Phase.RESERVING:
            self.rendezvous.fail(transfer, error, now)
            return
        if not fail(transfer, SENDER, error):
            return
        for destination in transfer.destinations:
            if destination.session is not reported_by:
                self.sessions.send_if_open(destination.session,
                                           m.Abort(transfer.room, destination.stamp, error.wire_code, error.message))
        self._finish_if_drained(transfer, now)

    def _finish_if_drained(self, transfer: SendTransfer, now: float) -> None:
        """Completes or fails the transfer where its writes allow it."""
        if transfer.in_flight or not transfer.destinations:
            return
        if transfer.phase is Phase.ABORTING:
            transfer.phase = step(SENDER, transfer.phase, Event.DRAINED)
            for destination in transfer.destinations:
                self.sessions.send_if_open(destination.session, m.Stopped(transfer.room, destination.stamp))
            self._count_end(transfer)
        elif transfer.phase >= Phase.RESERVED and transfer.phase is not Phase.DONE and transfer.result is not None \
                and not transfer.queued:
            transfer.phase = step(SENDER, transfer.phase, Event.COMPLETE)
            for destination in transfer.destinations:
                self.sessions.send_if_open(destination.session, m.Result(
                    transfer.room, destination.stamp, self.info.instance, transfer.result, destination.checksum))
            self.counters["kv_transfers_done"] += 1
            self.counters["kv_transfer_seconds"] += now - transfer.began
            self.counters["kv_transfer_exposed_seconds"] += now - transfer.computed
            self._count_end(transfer)

    def _count_end(self, transfer: SendTransfer) -> None:
        for destination in transfer.destinations:
            destination.session.transfers.pop(transfer.room, None)
        if transfer.error is not None:
            count_failure(self.counters, transfer.error)

    def _end_session(self, session: Session, error: ServingError, now: float) -> None:
        """Ends a session: all its transfers fail, and nothing is written to it any more."""
        was_open = self.sessions.close(session, error.message)
        self.rendezvous.drop_session(session, error, now)
        for transfer in list(session.transfers.values()):
            self._fail(transfer, error, now)
        if was_open:
            self.effects.append(Dismiss(session))
