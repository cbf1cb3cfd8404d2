"""A request served by one worker."""

from __future__ import annotations

from ..common.api.errors import DeadlineExceeded, ServingError, WorkerUnavailable
from .answer import AnswerHead, Failure
from .dispatch import RETRY_AFTER_SECONDS, Dispatcher, nobody
from .exchange import Exchange
from .policies import Subject
from .registry import Reservation, Role, Worker
from .retry import RETRYABLE_STATUSES, Retries
from .upstream import Call

_MESSAGES = {
    "failed": "The worker failed in the middle of the answer.",
    "connect": "The worker could not be reached.",
    "lost": "The worker closed its connection before the end of the answer.",
    "stale": "The worker closed its connection before the answer.",
    "malformed": "The worker's answer was not valid HTTP.",
    "removed": "The worker was taken out of service.",
    "silent": "The worker was silent for too long.",
}
"""By ``Failure.reason``. Which worker it was stands in the log: a client has no business with its address."""


def error_of(failure: Failure) -> ServingError:
    """What a client is told of an attempt that failed below HTTP."""
    message = _MESSAGES[failure.reason]
    if failure.reason == "silent":
        return DeadlineExceeded(message)
    return WorkerUnavailable(message, retry_after=RETRY_AFTER_SECONDS)


class Relay:
    """One request's life on whole workers: place, send, relay; before the first byte, try again.

    A failed connection is retried with backoff, first on workers that did not fail yet. A 5xx answer
    moves on to such a worker, and is relayed when there is none. Silence is not retried: a client
    that waited --request-timeout-secs once is not made to wait six times.
    """

    __slots__ = ("_dispatcher", "_exchange", "_role", "_subject", "_retries", "_reservation", "_call", "_paused",
                 "_own", "_only")

    def __init__(self, dispatcher: Dispatcher, exchange: Exchange, role: Role, subject: Subject,
                 *, own: bool = False, retries: Retries | None = None, only: Worker | None = None):
        """``own``: for our servers only; ``only`` for this worker; ``retries`` are those of attempts made before."""
        self._dispatcher = dispatcher
        self._exchange = exchange
        self._role = role
        self._subject = subject
        self._own = own
        self._only = only
        self._retries = retries
        self._reservation: Reservation | None = None
        self._call: Call | None = None
        self._paused = False

    def start(self) -> None:
        """Make an attempt; answers 503 when no worker is available."""
        exchange = self._exchange
        log = exchange.log if exchange.began else None
        workers = self._dispatcher.candidates(self._role, self._retries, own=self._own or log is not None,
                                              only=self._only)
        if not workers:
            self._again("unavailable", nobody(self._role))
            return
        self._reservation = self._dispatcher.place(self._role, workers, self._subject)
        worker = self._reservation.worker
        exchange.worker = worker.url
        body = exchange.request.body if log is None else log.resumed_body()
        self._call = self._dispatcher.send(worker, exchange.request, body, self)
        if self._paused:
            self._call.pause()

    # ------------------------------------------------------------------ the worker's side

    def answer_head(self, head: AnswerHead) -> None:
        worker = self._reservation.worker  # type: ignore[union-attr]  # held while the call runs
        status = head.facts.status
        if status >= 400 or worker.circuit.troubled:
            self._dispatcher.on_status(worker, status)
        exchange = self._exchange
        if exchange.began:
            self._answer_continued(head)
        elif status in RETRYABLE_STATUSES and self._may_move_on():
            self._drop()
            self._again(f"status_{status}", nobody(self._role))
        else:
            if not worker.is_baton:
                exchange.log = None
            exchange.begin(head)
            if exchange.log is None:
                self._subject = None  # No retry any more; a long stream need not hold its prompt.

    def _answer_continued(self, head: AnswerHead) -> None:
        if head.starts_stream:
            self._exchange.go_on(head)
        else:
            self._may_move_on()
            self._drop()
            self._again(f"continuation_status_{head.status}", nobody(self._role))

    def answer_data(self, data: bytes) -> None:
        self._exchange.relay(data)

    def answer_end(self, *, reusable: bool) -> None:
        worker = self._release()
        if (log := self._exchange.log) is not None and log.failed:
            self._tried().excluded.add(worker)
            self._broken(Failure("failed", f"{worker.url} ended a stream with an error"))
            return
        self._exchange.end(reusable=reusable)

    def answer_lost(self, failure: Failure) -> None:
        worker = self._release()
        self._dispatcher.on_failure(worker, failure)
        error = error_of(failure)
        self._tried().excluded.add(worker)
        if self._exchange.began:
            self._broken(failure)
        elif failure.reason == "silent":
            self._exchange.fail(error)
        else:
            self._again(failure.reason, error)

    def _broken(self, failure: Failure) -> None:
        """A stream broke: it goes on elsewhere, or ends with an error."""
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
        self._drop()
        self._exchange.abandon()

    def pause(self) -> None:
        self._paused = True
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        self._paused = False
        if self._call is not None:
            self._call.resume()

    # ------------------------------------------------------------------ inside

    def _tried(self) -> Retries:
        if self._retries is None:
            self._retries = self._dispatcher.new_retries()
        return self._retries

    def _may_move_on(self) -> bool:
        assert self._reservation is not None
        retries = self._tried()
        retries.excluded.add(self._reservation.worker)
        return retries.left and self._dispatcher.untried(self._role, retries)

    def _again(self, reason: str, error: ServingError) -> None:
        """Schedule another attempt; answer with ``error`` when retries are spent or none was started."""
        if self._retries is not None and self._retries.schedule(self.start):
            self._exchange.retries += 1
            self._dispatcher.metrics.retries[reason] += 1
        elif self._exchange.began:
            self._exchange.break_off(error, Failure(reason, f"the stream could not go on ({reason})"))
        else:
            self._exchange.fail(error)

    def _drop(self) -> None:
        """Cut the running attempt, if there is one."""
        if self._call is not None:
            self._call.cancel()
            self._release()

    def _release(self) -> Worker:
        """The running attempt is over: give its reservation back; returns its worker."""
        reservation = self._reservation
        assert reservation is not None
        self._reservation = self._call = None
        reservation.release()
        return reservation.worker
