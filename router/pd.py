"""A request served by a pair: the same body to a prefill and a decode worker, decode's answer to the client.

The halves find each other through the fields that are spliced into the body (``bootstrap_*``); the
room is new for every attempt, so that no late half of an old attempt can join a new one.
"""

from __future__ import annotations

from ..common.api.errors import ServingError, TransferFailed
from .answer import AnswerHead, Failure
from .body import Peek, bootstrap_fields, splice
from .dispatch import Dispatcher, nobody
from .exchange import Exchange
from .ranks import tell_prefill_rank
from .registry import Reservation, Role, Worker
from .relay import Relay, error_of
from .retry import RETRYABLE_STATUSES, Retries
from .upstream import Call


class Half:
    """One of the two calls of an attempt. It reports to its pair until it is left alone.

    A prefill half may outlive its pair's answer by a moment (its own answer is of no use); it then
    ends by itself and still gives its reservation back.
    """

    __slots__ = ("role", "worker", "_reservation", "_pair", "call")

    def __init__(self, pair: PairRelay, role: Role, reservation: Reservation):
        self.role = role
        self.worker = reservation.worker
        self._reservation = reservation
        self._pair: PairRelay | None = pair
        self.call: Call | None = None

    def leave(self) -> None:
        """Let the half end by itself."""
        self._pair = None

    def cancel(self) -> None:
        """Cut the half, if it still runs."""
        self._pair = None
        if self.call is not None:
            self.call.cancel()
            self._close()

    def _close(self) -> PairRelay | None:
        """The call is over: give its load back, and let go of the pair, which is returned if it is still there."""
        pair, self._pair = self._pair, None
        self.call = None
        self._reservation.release()
        return pair

    def answer_head(self, head: AnswerHead) -> None:
        if self._pair is not None:
            self._pair.half_answered(self, head)

    def answer_data(self, data: bytes) -> None:
        if self._pair is not None:
            self._pair.half_sent(self, data)

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

    __slots__ = ("_dispatcher", "_exchange", "_peek", "_retries", "_prefill", "_decode", "_relayed", "_paused",
                 "_only")

    def __init__(self, dispatcher: Dispatcher, exchange: Exchange, peek: Peek, *, only: Worker | None = None):
        """``only``: the decode worker that alone can answer."""
        self._only = only
        self._dispatcher = dispatcher
        self._exchange = exchange
        self._peek: Peek | None = peek
        self._retries: Retries | None = None
        self._prefill: Half | None = None
        self._decode: Half | None = None
        self._relayed: Half | None = None
        self._paused = False

    def start(self) -> None:
        """Make an attempt; answers 503 when a role has no worker available."""
        dispatcher, exchange = self._dispatcher, self._exchange
        log = exchange.log if exchange.began else None
        self._relayed = None
        prefills = dispatcher.candidates("prefill", self._retries, own=log is not None)
        decodes = dispatcher.candidates("decode", self._retries, own=log is not None, only=self._only)
        if not prefills and dispatcher.candidates("decode", self._retries, own=True):
            self._leave_to_decode()
            return
        if not prefills or not decodes:
            self._again("unavailable", nobody("decode" if prefills else "prefill"))
            return
        found = self._peek
        assert found is not None
        held_prefill, held_decode = dispatcher.place_pair(prefills, decodes, exchange.request, found)
        self._prefill = prefill = Half(self, "prefill", held_prefill)
        self._decode = decode = Half(self, "decode", held_decode)
        exchange.worker = f"{prefill.worker.url} {decode.worker.url}"
        fields = bootstrap_fields(prefill.worker.endpoint.host, prefill.worker.bootstrap_port, dispatcher.rng,
                                  found.batch_size)
        body = splice(exchange.request.body if log is None else log.resumed_body(), found, fields)
        prefill.call = dispatcher.send(prefill.worker, exchange.request, body, prefill, resend=False)
        if prefill.worker.rank is not None:
            body = tell_prefill_rank(body, prefill.worker.rank)
        decode.call = dispatcher.send(decode.worker, exchange.request, body, decode, resend=False)

    # ------------------------------------------------------------------ the workers' side

    def half_answered(self, half: Half, head: AnswerHead) -> None:
        # A failed transfer is seldom the fault of the half that reports it: its peer may have been restarted.
        if (head.status >= 400 or half.worker.circuit.troubled) and head.status != TransferFailed.status:
            self._dispatcher.on_status(half.worker, head.status)
        if self._relayed is not None or (half is self._prefill and head.status < 400):
            return
        exchange = self._exchange
        if exchange.began:
            self._half_continued(half, head)
            return
        if head.status in RETRYABLE_STATUSES and self._may_try_again(half, head.status):
            self._cancel_halves()
            self._again(f"{half.role}_status_{head.status}", nobody(half.role))
            return
        self._relayed = half
        if not half.worker.is_baton:
            exchange.log = None
        if head.status >= 400:
            self._other(half).cancel()
        exchange.begin(head)
        if exchange.log is None:
            self._peek = None  # No retry any more; a long stream need not hold its prompt.
        if self._paused and half.call is not None:
            half.call.pause()

    def _half_continued(self, half: Half, head: AnswerHead) -> None:
        """A pair that goes on with a broken stream answers."""
        if head.starts_stream:
            self._relayed = half
            self._exchange.go_on(head)
            if self._paused and half.call is not None:
                half.call.pause()
        else:
            self._may_try_again(half, head.status)
            self._cancel_halves()
            self._again(f"continuation_status_{head.status}", nobody(half.role))

    def _leave_to_decode(self) -> None:
        """No prefill worker is there: one of our decode servers does all of the work."""
        exchange = self._exchange
        relay = Relay(self._dispatcher, exchange, "decode",
                      self._dispatcher.subject("decode", exchange.request, self._peek), own=True, retries=self._retries,
                      only=self._only)
        exchange.connection.handler = relay
        if self._paused:
            relay.pause()
        relay.start()

    def half_sent(self, half: Half, data: bytes) -> None:
        if half is self._relayed:
            self._exchange.relay(data)

    def half_ended(self, half: Half, reusable: bool) -> None:
        if half is self._relayed:
            log = self._exchange.log
            if log is not None and log.failed:
                self._other(half).cancel()
                self._tried().excluded.add(half.worker)
                self._broken(Failure("failed", f"{half.worker.url} ended a stream with an error"))
                return
            self._other(half).leave()
            self._exchange.end(reusable=reusable)

    def half_lost(self, half: Half, failure: Failure) -> None:
        if failure.reason != "stale":  # Not the worker's failure, but the room may be known there: a new attempt.
            self._dispatcher.on_failure(half.worker, failure)
            self._tried().excluded.add(half.worker)
        if self._relayed is not None and half is not self._relayed:
            return  # Prefill broke after decode began to answer: decode has what it needs, or tells what it lacks.
        self._other(half).cancel()
        error = error_of(failure)
        if self._exchange.began:
            self._tried()
            self._broken(failure)
        elif failure.reason == "silent":
            self._exchange.fail(error)
        else:
            self._tried()
            self._again(f"{half.role}_{failure.reason}", error)

    def _broken(self, failure: Failure) -> None:
        """A stream broke: it goes on with another pair, or ends with an error."""
        exchange = self._exchange
        if exchange.log is None:
            exchange.break_off(error_of(failure), failure)
        elif (missing := exchange.log.missing_end) is not None:
            exchange.end_broken(missing)
        else:
            self._dispatcher.metrics.continued_streams += 1
            self._again("continuation", error_of(failure))

    # ------------------------------------------------------------------ the client's side

    def cancel(self) -> None:
        if self._retries is not None:
            self._retries.cancel()
        self._cancel_halves()
        self._exchange.abandon()

    def pause(self) -> None:
        self._paused = True
        if (half := self._relayed) is not None and half.call is not None:
            half.call.pause()

    def resume(self) -> None:
        self._paused = False
        if (half := self._relayed) is not None and half.call is not None:
            half.call.resume()

    # ------------------------------------------------------------------ inside

    def _other(self, half: Half) -> Half:
        other = self._decode if half is self._prefill else self._prefill
        assert other is not None
        return other

    def _cancel_halves(self) -> None:
        for half in (self._prefill, self._decode):
            if half is not None:
                half.cancel()

    def _tried(self) -> Retries:
        if self._retries is None:
            self._retries = self._dispatcher.new_retries()
        return self._retries

    def _may_try_again(self, half: Half, status: int) -> bool:
        """A failed transfer is worth another try on the same pair; other 5xx only on a worker that did not fail yet.

        The half that reports a failed transfer is seldom to blame: its peer may just have been restarted.
        """
        retries = self._tried()
        if status != TransferFailed.status:
            retries.excluded.add(half.worker)
        return retries.left and self._dispatcher.untried(half.role, retries)

    def _again(self, reason: str, error: ServingError) -> None:
        """Schedule another attempt; answer with ``error`` when retries are spent or none was started."""
        if self._retries is not None and self._retries.schedule(self.start):
            self._exchange.retries += 1
            self._dispatcher.metrics.retries[reason] += 1
        elif self._exchange.began:
            self._exchange.break_off(error, Failure(reason, f"the stream could not go on ({reason})"))
        else:
            self._exchange.fail(error)
