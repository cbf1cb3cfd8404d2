"""A request served by a pair: the same body to a prefill and a decode worker, decode's response to the client.

The two calls are joined by the fields that are spliced into the body (``bootstrap_*``). The room is new for every
attempt, so that no late call of an old attempt can join a new one. If only the decode call failed, the next attempt
goes to the same prefill worker, which still has what it computed. ``pair_states`` has the phases of an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ...common.api.errors import ServingError, TransferFailed, WorkerUnavailable
from ..net.body import Body, RoutingFields, with_bootstrap, with_previous_room
from ..net.upstream import Call
from ..net.upstream_response import PAIR_MISMATCH, PEER_FAILED, Failure, ResponseHead
from ..workers.dp_ranks import with_prefill_rank
from ..workers.registry import Reservation, Role, Worker, without
from ..workers.roles import SENDER
from .attempts import note_failed_attempt, on_attempt_complete, on_attempt_lost, on_expired, retry_or_fail
from .client_response import ClientResponse
from .dispatcher import Dispatcher, no_pair_error, no_worker_error
from .pair_states import (
    FAIL,
    FINISH,
    IDLE,
    IGNORE,
    NOTE,
    OPENING,
    REFUSING,
    RELAY,
    RELAYING,
    RESUME_OR_RETRY,
    RESUMING,
    RETRY,
    RETRY_OR_REFUSE,
    SEND,
    STOP,
    InvalidTransition,
    Phase,
)
from .retry import FAILURES, PASSED_ON, Outcome, Retries, outcome_of
from .single import Relay


class PairCall(msgspec.Struct, eq=False):
    """One of the two calls of an attempt. It reports to its pair until it is detached.

    A prefill call may outlive the response to the client by a moment, as its own response is not read. It then ends
    by itself, and still releases its reservation.
    """

    pair: PairRelay | None
    role: Role
    reservation: Reservation
    worker: Worker
    upstream: Call | None = None

    def detach(self) -> None:
        """Let the call end by itself."""
        self.pair = None

    def cancel(self) -> None:
        """Cancel the call, if it still runs."""
        self.pair = None
        if self.upstream is not None:
            self.upstream.cancel()
            self._close()

    def _close(self) -> PairRelay | None:
        """Release the load of a call that is over; returns the pair if the call was not detached from it."""
        pair, self.pair = self.pair, None
        self.upstream = None
        self.reservation.release()
        return pair

    def on_response_head(self, head: ResponseHead) -> None:
        if self.pair is not None:
            self.pair.on_call_head(self, head)

    def on_response_data(self, data: bytes) -> None:
        if self.pair is not None:
            self.pair.on_call_data(self, data)

    def on_response_end(self, *, reusable: bool) -> None:
        pair = self._close()
        if pair is not None:
            pair.on_call_end(self, reusable)

    def on_response_lost(self, failure: Failure) -> None:
        pair = self._close()
        if pair is not None:
            pair.on_call_lost(self, failure)


class PairRelay:
    """One request's life on pairs: place both calls, send both, relay one response; before its first byte, retry."""

    __slots__ = ("dispatcher", "response", "_fields", "retries", "_prefill", "_decode", "_phase", "_relayed", "_paused",
                 "_pinned", "_retaining", "_avoided", "_retained", "_retained_before")

    def __init__(self, dispatcher: Dispatcher, response: ClientResponse, fields: RoutingFields, *,
                 pinned: Worker | None = None):
        """``pinned``: the one decode worker that can answer."""
        self._pinned = pinned
        self.dispatcher = dispatcher
        self.response = response
        self._fields: RoutingFields | None = fields
        self.retries: Retries | None = None
        self._prefill: PairCall | None = None
        self._decode: PairCall | None = None
        self._phase = IDLE
        self._relayed: PairCall | None = None
        """The call whose response goes to the client."""
        self._paused = False
        self._retaining: Worker | None = None
        """The prefill worker to go back to: only decode failed, so it retains the prompt's KV cache."""
        self._avoided: Worker | None = None
        """The worker that its peer could not reach: not to be tried again if there is another one."""
        self._retained: Body = b""
        """The body of the last attempt that reached a decode worker: prefill retains the prompt under its room."""
        self._retained_before: Body = b""
        """``_retained`` before the last attempt."""

    # ------------------------------------------------------------------ an attempt

    def start(self) -> None:
        """Make an attempt; answers 503 when a role has no worker available."""
        assert self._phase.start is SEND
        dispatcher, response, fields = self.dispatcher, self.response, self._fields
        assert fields is not None
        if dispatcher.registry.hold:
            dispatcher.hold.add(self)
            return
        request, suspect = response.request, response.suspect
        log = response.log if response.began else None  # Of a stream that this attempt continues.
        self._relayed = None
        prefills, decodes = dispatcher.pair_candidates(
            self.retries, request.group, baton_only=log is not None, pinned=self._pinned,
            fingerprint=None if log is None else log.model_fingerprint)
        if self.retries is not None or suspect is not None or not prefills or not decodes:
            prefills, decodes = self._narrow(prefills, decodes)
            if not prefills:
                return
        try:
            p_reservation, d_reservation = dispatcher.place_pair(prefills, decodes, request, fields)
        except WorkerUnavailable as error:
            retry_or_fail(self, "unavailable", error)
            return
        p, d = p_reservation.worker, d_reservation.worker
        if d.serves_whole:
            for reservation in (p_reservation, d_reservation):
                reservation.release()
            self._leave_to_decode(d)
            return
        self._prefill = prefill = PairCall(self, "prefill", p_reservation, p)
        self._decode = decode = PairCall(self, "decode", d_reservation, d)
        response.workers = (p, d)
        if suspect is not None:
            suspect.enter(p if suspect.role == SENDER else d)
        body = with_bootstrap(request.body if log is None else log.continuation_body(), fields, p.endpoint.host,
                              p.bootstrap_port, dispatcher.rng)
        retained = self._retained
        prefill_body = with_previous_room(body, retained) if p is self._retaining and p.is_baton and retained else body
        self._retained_before, self._retained = retained, body if log is None else b""
        self._retaining = self._avoided = None
        self._phase = OPENING if log is None else RESUMING
        prefill.upstream = dispatcher.send(p, request, prefill_body, prefill, resend=False)
        if p.rank is not None:
            body = with_prefill_rank(body, p.rank)
        decode.upstream = dispatcher.send(d, request, body, decode, resend=False)

    def _narrow(self, prefills: Sequence[Worker],
                decodes: Sequence[Worker]) -> tuple[Sequence[Worker], Sequence[Worker]]:
        """The workers to choose from, after what earlier attempts showed; none if the attempt is postponed, given up or
        left to a decode worker alone."""
        dispatcher, response = self.dispatcher, self.response
        group, suspect = response.request.group, response.suspect
        if not prefills and dispatcher.candidates("decode", self.retries, group, baton_only=True):
            self._leave_to_decode()
            return (), ()
        if not prefills or not decodes:
            retry_or_fail(self, "unavailable", no_pair_error(dispatcher.registry, group))
            return (), ()
        if suspect is not None and suspect.deaths:
            admitted = dispatcher.poison.admit(suspect, prefills if suspect.role == SENDER else decodes, self.start)
            if not admitted:
                return (), ()  # The guard calls ``start`` when a worker is free for it.
            prefills, decodes = (admitted, decodes) if suspect.role == SENDER else (prefills, admitted)
        avoided = self._avoided
        if avoided is not None:
            prefills = without(prefills, {avoided}) or prefills
            decodes = without(decodes, {avoided}) or decodes
        retaining = self._retaining
        if retaining is not None and retaining in prefills:
            prefills = [retaining]
        return prefills, decodes

    def _leave_to_decode(self, chosen: Worker | None = None) -> None:
        """Without any prefill worker, one of our decode servers does all of the work; or the ``chosen`` one, which
        computes whole requests."""
        response = self.response
        relay = Relay(self.dispatcher, response, "decode",
                      self.dispatcher.subject("decode", response.request, self._fields), baton_only=True,
                      retries=self.retries, pinned=self._pinned, first=chosen)
        response.connection.handler = relay
        if self._paused:
            relay.pause()
        relay.start()

    # ------------------------------------------------------------------ the workers' side

    def on_call_head(self, call: PairCall, head: ResponseHead) -> None:
        status = head.facts.status
        accepted = status < 400
        outcome = PASSED_ON if accepted else outcome_of(status, pair=True)
        failed = self._other(call) if not accepted and head.has_line(PEER_FAILED) else call
        if not accepted or call.worker.circuit.troubled or (call is self._decode and self.retries is not None):
            retries = self.retries if call is self._decode else None  # Prefill's 200 says nothing yet.
            self.dispatcher.on_status(failed.worker, status, outcome, retries)
            if status == TransferFailed.status and head.has_line(PAIR_MISMATCH):
                self.dispatcher.on_misfit(*self.response.workers)
        phase = self._phase
        actions = phase.decode if call is self._decode else phase.prefill
        action = actions.accepted if accepted else actions.refused
        if action is IGNORE:
            return
        if action is RELAY:
            self._relay(call, head, RELAYING)
        elif action is RETRY_OR_REFUSE:
            if outcome.retried and self._blame(failed, outcome):
                self._retry(failed, outcome, f"{failed.role}_status_{status}", at_once=outcome.busy)
            else:
                self._refuse(call, head, outcome)
        elif action is RESUME_OR_RETRY and head.starts_stream:
            self._phase, self._relayed = RELAYING, call
            self.response.continue_stream(head)
            self._pause_relayed()
        elif action is RESUME_OR_RETRY or action is RETRY:
            untried = self._blame(failed, outcome)
            self._retry(failed, outcome, f"continuation_status_{status}", at_once=untried and outcome.busy)
        else:
            raise InvalidTransition(f"{call.role} {'accepted' if accepted else 'refused'} in {phase.name}")

    def on_call_data(self, call: PairCall, data: bytes) -> None:
        if call is self._relayed:
            self.response.relay(data)

    def on_call_end(self, call: PairCall, reusable: bool) -> None:
        phase = self._phase
        action = phase.decode.ended if call is self._decode else phase.prefill.ended
        if action is FINISH:
            self._phase = IDLE
            other, log = self._other(call), self.response.log
            if log is not None and log.failed:
                other.cancel()
            else:
                other.detach()
            on_attempt_complete(self, call.worker, call.role, reusable=reusable)
        elif action is not IGNORE:
            raise InvalidTransition(f"{call.role} ended in {phase.name}")

    def on_call_lost(self, call: PairCall, failure: Failure) -> None:
        phase = self._phase
        action = phase.decode.lost if call is self._decode else phase.prefill.lost
        if action is NOTE:
            self.dispatcher.on_failure(call.worker, failure)
            note_failed_attempt(self, call.worker, FAILURES[failure.reason])
            return
        if action is not FAIL:
            raise InvalidTransition(f"{call.role} lost in {phase.name}")
        self._phase = IDLE
        self._other(call).cancel()
        if call is self._decode and not self.response.began:
            self._retaining = self._other(call).worker
            if failure.reason == "connect":
                self._retained = self._retained_before  # Prefill retains it under the room of the attempt before.
        on_attempt_lost(self, call.worker, call.role, failure, f"{call.role}_{failure.reason}")

    # ------------------------------------------------------------------ the client's side

    def cancel(self) -> None:
        self._stop()
        self.response.abandon()

    def expire(self, error: ServingError) -> None:
        relayed = self._relayed
        at_boundary = relayed is not None and relayed.upstream is not None and relayed.upstream.at_boundary
        self._stop()
        on_expired(self, error, at_boundary)

    def pause(self) -> None:
        self._paused = True
        self._pause_relayed()

    def resume(self) -> None:
        self._paused = False
        if (relayed := self._relayed) is not None and relayed.upstream is not None:
            relayed.upstream.resume()

    # ------------------------------------------------------------------ actions

    def _relay(self, call: PairCall, head: ResponseHead, phase: Phase) -> None:
        """Relay the response of a call, head and all."""
        self._phase, self._relayed = phase, call
        response = self.response
        response.begin(head, call.worker)
        self._retained = b""
        if response.log is None:
            self._fields = None  # No retry any more; a long stream need not keep its prompt in memory.
        if self._paused:
            self._pause_relayed()

    def _refuse(self, call: PairCall, head: ResponseHead, outcome: Outcome) -> None:
        """Relay the error of a call, and cancel the other."""
        if outcome.busy:
            head.add_retry_after()
        self._other(call).cancel()
        self._relay(call, head, REFUSING)

    def _retry(self, call: PairCall, outcome: Outcome, reason: str, *, at_once: bool) -> None:
        """Cancel both calls, of which one answered with an error, and make another attempt."""
        self._cancel_calls()

        def proceed() -> None:
            retry_or_fail(self, reason, no_worker_error(call.role), at_once=at_once)

        if outcome.excludes:
            proceed()
        else:  # The transfer may have failed because the other call's worker has just died.
            peer = self._other(call)
            self.dispatcher.poison.on_death(self.response, peer.worker, peer.role, by_peer=True, proceed=proceed)

    def take_back(self) -> None:
        """Gives up an attempt whose prompt prefill still computes; it begins anew, and that costs no retry."""
        prefill = self._prefill
        if self._phase in (OPENING, RESUMING) and prefill is not None and prefill.upstream is not None:
            self._cancel_calls()
            self.start()

    def _stop(self) -> None:
        assert self._phase.cancel is STOP
        self.dispatcher.hold.leave(self)
        if self.retries is not None:
            self.retries.cancel()
        self._cancel_calls()

    def _cancel_calls(self) -> None:
        self._phase = IDLE
        for call in (self._prefill, self._decode):
            if call is not None:
                call.cancel()

    def _pause_relayed(self) -> None:
        """Stop reading the relayed response while the client does not read it."""
        if self._paused and (relayed := self._relayed) is not None and relayed.upstream is not None:
            relayed.upstream.pause()

    def _other(self, call: PairCall) -> PairCall:
        other = self._decode if call is self._prefill else self._prefill
        assert other is not None
        return other

    def _blame(self, call: PairCall, outcome: Outcome) -> bool:
        """Note which worker is to blame for the error of ``call``; returns whether another attempt may repair it.

        A failed transfer excludes no worker: the same pair may be tried again, but first others than the peer of the
        call that reports it. Everything else needs a worker that has not failed this request yet.
        """
        retries = note_failed_attempt(self, call.worker, outcome, answered=True)
        peer = self._other(call)
        if not outcome.excludes:
            self._avoided = peer.worker
        failed = call if outcome.excludes else peer
        if failed is self._decode:
            self._retaining = self._other(failed).worker
        return retries.allows(outcome) and self.dispatcher.has_untried(call.role, retries, self.response.request.group)
