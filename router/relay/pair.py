"""A request served by a pair: the same body to a prefill and a decode worker, decode's answer to the client.

The halves find each other through the fields that are spliced into the body (``bootstrap_*``); the
room is new for every attempt, so that no late half of an old attempt can join a new one. Where only the
decode half failed, the next attempt goes to the same prefill worker, which still has what it computed.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from ...common.api.errors import ServingError, TransferFailed, WorkerUnavailable
from ..net.body import Body, Peek, with_bootstrap, with_previous_room
from ..net.upstream import Call
from ..net.upstream_answer import PAIR_MISMATCH, AnswerHead, Failure
from ..workers.dp_ranks import tell_prefill_rank
from ..workers.registry import Reservation, Role, Worker, without
from .attempts import again, ended, expired, lost, tried_on
from .client_response import ClientResponse
from .dispatcher import Dispatcher, no_pair, nobody
from .retry import FAILURES, Outcome, Retries, outcome_of
from .single import Relay


class PairCall(msgspec.Struct, eq=False):
    """One of the two calls of an attempt. It reports to its pair until it is left alone.

    A prefill half may outlive its pair's answer by a moment (its own answer is of no use); it then
    ends by itself and still gives its reservation back.
    """

    pair: PairRelay | None
    role: Role
    reservation: Reservation
    worker: Worker
    call: Call | None = None

    def leave(self) -> None:
        """Let the half end by itself."""
        self.pair = None

    def cancel(self) -> None:
        """Cut the half, if it still runs."""
        self.pair = None
        if self.call is not None:
            self.call.cancel()
            self._close()

    def _close(self) -> PairRelay | None:
        """The call is over: give its load back, and let go of the pair, which is returned if it is still there."""
        pair, self.pair = self.pair, None
        self.call = None
        self.reservation.release()
        return pair

    def answer_head(self, head: AnswerHead) -> None:
        if self.pair is not None:
            self.pair.half_answered(self, head)

    def answer_data(self, data: bytes) -> None:
        if self.pair is not None:
            self.pair.half_sent(self, data)

    def answer_end(self, *, reusable: bool) -> None:
        pair = self._close()
        if pair is not None:
            pair.half_ended(self, reusable)

    def answer_lost(self, failure: Failure) -> None:
        pair = self._close()
        if pair is not None:
            pair.half_lost(self, failure)


class PairRelay:
    """One request's life on pairs: place both, send both, relay one; before the first byte, try again.

    ``_relayed`` is the half whose answer goes to the client, once that is decided: decode's, or the
    half that refuses the request (prefill's 400 must not wait for a decode worker that will never be
    sent a cache). A half that fails cancels the other at once.
    """

    __slots__ = ("dispatcher", "exchange", "_peek", "retries", "_prefill", "_decode", "_relayed", "_paused",
                 "_only", "_sent", "_sent_before", "_again_on", "_suspect")

    def __init__(self, dispatcher: Dispatcher, exchange: ClientResponse, peek: Peek, *, only: Worker | None = None):
        """``only``: the decode worker that alone can answer."""
        self._only = only
        self.dispatcher = dispatcher
        self.exchange = exchange
        self._peek: Peek | None = peek
        self.retries: Retries | None = None
        self._prefill: PairCall | None = None
        self._decode: PairCall | None = None
        self._relayed: PairCall | None = None
        self._paused = False
        self._sent: Body = b""  # to the prefill worker of the last attempt that reached a decode worker; see start
        self._sent_before: Body = b""
        self._again_on: Worker | None = None  # the prefill worker of an attempt whose decode half failed
        self._suspect: Worker | None = None  # whose peer could not reach it: the next attempt is not for it

    def start(self) -> None:
        """Make an attempt; answers 503 when a role has no worker available."""
        dispatcher, exchange = self.dispatcher, self.exchange
        log = exchange.log if exchange.began else None
        self._relayed = None
        group = exchange.request.group
        prefills, decodes = dispatcher.pair_candidates(self.retries, group, own=log is not None, only=self._only,
                                                       weights=None if log is None else log.weights)
        if not prefills and dispatcher.candidates("decode", self.retries, group, own=True):
            self._leave_to_decode()
            return
        if not prefills or not decodes:
            again(self, "unavailable", no_pair(dispatcher.registry, group))
            return
        found = self._peek
        assert found is not None
        suspect = exchange.suspect
        if suspect is not None and suspect.deaths:
            admitted = dispatcher.poison.admit(suspect, prefills if suspect.role == "prefill" else decodes, self.start)
            if not admitted:
                return  # It waits for its turn.
            prefills, decodes = (admitted, decodes) if suspect.role == "prefill" else (prefills, admitted)
        if self._suspect is not None:
            prefills = without(prefills, {self._suspect}) or prefills
            decodes = without(decodes, {self._suspect}) or decodes
        same = self._again_on if self._again_on in prefills else None
        if same is not None:
            prefills = [same]
        try:
            held_prefill, held_decode = dispatcher.place_pair(prefills, decodes, exchange.request, found)
        except WorkerUnavailable as error:
            again(self, "unavailable", error)
            return
        self._prefill = prefill = PairCall(self, "prefill", held_prefill, held_prefill.worker)
        self._decode = decode = PairCall(self, "decode", held_decode, held_decode.worker)
        exchange.workers = (prefill.worker, decode.worker)
        if suspect is not None:
            suspect.enter(prefill.worker if suspect.role == "prefill" else decode.worker)
        body = with_bootstrap(exchange.request.body if log is None else log.resumed_body(), found,
                              prefill.worker.endpoint.host, prefill.worker.bootstrap_port, dispatcher.rng)
        told = with_previous_room(body, self._sent) if same is not None and same.is_baton and self._sent else body
        self._sent_before, self._sent = self._sent, body if log is None else b""
        self._again_on = self._suspect = None
        prefill.call = dispatcher.send(prefill.worker, exchange.request, told, prefill, resend=False)
        if prefill.worker.rank is not None:
            body = tell_prefill_rank(body, prefill.worker.rank)
        decode.call = dispatcher.send(decode.worker, exchange.request, body, decode, resend=False)

    # ------------------------------------------------------------------ the workers' side

    def half_answered(self, half: PairCall, head: AnswerHead) -> None:
        status = head.facts.status
        outcome = outcome_of(status, pair=True)
        if status >= 400 or half.worker.circuit.troubled or (half is self._decode and self.retries is not None):
            retries = self.retries if half is self._decode else None  # Prefill's 200 says nothing yet.
            self.dispatcher.on_status(half.worker, status, outcome, retries)
        if status == TransferFailed.status and head.says(PAIR_MISMATCH):
            self.dispatcher.on_misfit(*self.exchange.workers)
        if self._relayed is not None or (half is self._prefill and status < 400):
            return
        exchange = self.exchange
        if exchange.began:
            self._half_continued(half, head, outcome)
            return
        if outcome.retried and self._may_try_again(half, outcome):
            self._cancel_halves()
            self._go_on_behind(half, outcome, lambda: again(
                self, f"{half.role}_status_{status}", nobody(half.role), at_once=outcome.busy))
            return
        if outcome.busy:
            head.ask_to_wait()
        self._relayed = half
        if not half.worker.is_baton:
            exchange.log = None
        elif exchange.log is not None:
            exchange.log.weights = half.worker.model_fingerprint
        if status >= 400:
            self._other(half).cancel()
        exchange.begin(head)
        self._sent = b""
        if exchange.log is None:
            self._peek = None  # No retry any more; a long stream need not hold its prompt.
        if self._paused and half.call is not None:
            half.call.pause()

    def _half_continued(self, half: PairCall, head: AnswerHead, outcome: Outcome) -> None:
        """A pair that goes on with a broken stream answers."""
        if head.starts_stream:
            self._relayed = half
            self.exchange.go_on(head)
            if self._paused and half.call is not None:
                half.call.pause()
        else:
            untried = self._may_try_again(half, outcome)
            self._cancel_halves()
            self._go_on_behind(half, outcome, lambda: again(
                self, f"continuation_status_{head.status}", nobody(half.role), at_once=untried and outcome.busy))

    def _go_on_behind(self, half: PairCall, outcome: Outcome, go_on: Callable[[], None]) -> None:
        """Go on after a half's answer: a transfer may have failed because the other half's worker has just died."""
        if outcome.excludes:
            go_on()
            return
        peer = self._other(half)
        self.dispatcher.poison.died(self.exchange, peer.worker, peer.role, by_peer=True, go_on=go_on)

    def _leave_to_decode(self) -> None:
        """No prefill worker is there: one of our decode servers does all of the work."""
        exchange = self.exchange
        relay = Relay(self.dispatcher, exchange, "decode",
                      self.dispatcher.subject("decode", exchange.request, self._peek), own=True, retries=self.retries,
                      only=self._only)
        exchange.connection.handler = relay
        if self._paused:
            relay.pause()
        relay.start()

    def half_sent(self, half: PairCall, data: bytes) -> None:
        if half is self._relayed:
            self.exchange.relay(data)

    def half_ended(self, half: PairCall, reusable: bool) -> None:
        if half is self._relayed:
            other, log = self._other(half), self.exchange.log
            if log is not None and log.failed:
                other.cancel()
            else:
                other.leave()
            ended(self, half.worker, half.role, reusable=reusable)

    def half_lost(self, half: PairCall, failure: Failure) -> None:
        if self._relayed is not None and half is not self._relayed:
            # Prefill broke after decode began to answer: decode has what it needs, or tells what it lacks.
            self.dispatcher.on_failure(half.worker, failure)
            tried_on(self, half.worker, FAILURES[failure.reason])
            return
        self._other(half).cancel()
        if half is self._decode and not self.exchange.began:
            self._again_on = self._prefill_worker
            if failure.reason == "connect":
                self._sent = self._sent_before  # What prefill keeps, it keeps under the room of the attempt before.
        lost(self, half.worker, half.role, failure, f"{half.role}_{failure.reason}")

    # ------------------------------------------------------------------ the client's side

    def cancel(self) -> None:
        if self.retries is not None:
            self.retries.cancel()
        self._cancel_halves()
        self.exchange.abandon()

    def expire(self, error: ServingError) -> None:
        if self.retries is not None:
            self.retries.cancel()
        half = self._relayed
        at_boundary = half is not None and half.call is not None and half.call.at_boundary
        self._cancel_halves()
        expired(self, error, at_boundary)

    def pause(self) -> None:
        self._paused = True
        if (half := self._relayed) is not None and half.call is not None:
            half.call.pause()

    def resume(self) -> None:
        self._paused = False
        if (half := self._relayed) is not None and half.call is not None:
            half.call.resume()

    # ------------------------------------------------------------------ inside

    def _other(self, half: PairCall) -> PairCall:
        other = self._decode if half is self._prefill else self._prefill
        assert other is not None
        return other

    @property
    def _prefill_worker(self) -> Worker | None:
        return None if self._prefill is None else self._prefill.worker

    def _cancel_halves(self) -> None:
        for half in (self._prefill, self._decode):
            if half is not None:
                half.cancel()

    def _may_try_again(self, half: PairCall, outcome: Outcome) -> bool:
        """A failed transfer is worth another try on the same pair, which excludes nobody, though first without the peer
        of the half that reports it; all else only on a worker that did not fail yet."""
        retries = tried_on(self, half.worker, outcome, answered=True)
        if not outcome.excludes:
            self._suspect = self._other(half).worker
        if (half is self._decode) is outcome.excludes:
            self._again_on = self._prefill_worker
        return retries.allows(outcome) and self.dispatcher.untried(half.role, retries, self.exchange.request.group)
