"""A request served by one worker."""

from __future__ import annotations

from ...common.api.errors import ServingError, WorkerUnavailable
from ..net.upstream import Call
from ..net.upstream_answer import AnswerHead, Failure
from ..policies import Subject
from ..workers.registry import Reservation, Role, Worker
from .attempts import again, ended, expired, lost, tried_on
from .client_response import ClientResponse
from .dispatcher import Dispatcher, nobody
from .retry import Outcome, Retries, outcome_of


class Relay:
    """One request's life on whole workers: place, send, relay; before the first byte, try again.

    A failed connection is retried with backoff, first on workers that did not fail yet. An answer that
    blames the worker moves on to such a worker, and is relayed when there is none (``retry`` has the
    table). Silence is not retried: a client that waited --request-timeout-secs once is not made to
    wait six times.
    """

    __slots__ = ("dispatcher", "exchange", "_role", "_subject", "retries", "_reservation", "_call", "_paused",
                 "_own", "_only")

    def __init__(self, dispatcher: Dispatcher, exchange: ClientResponse, role: Role, subject: Subject,
                 *, own: bool = False, retries: Retries | None = None, only: Worker | None = None):
        """``own``: for our servers only; ``only`` for this worker; ``retries`` are those of attempts made before."""
        self.dispatcher = dispatcher
        self.exchange = exchange
        self._role = role
        self._subject = subject
        self._own = own
        self._only = only
        self.retries = retries
        self._reservation: Reservation | None = None
        self._call: Call | None = None
        self._paused = False

    def start(self) -> None:
        """Make an attempt; answers 503 when no worker is available."""
        exchange = self.exchange
        log = exchange.log if exchange.began else None
        workers = self.dispatcher.candidates(self._role, self.retries, exchange.request.group,
                                             own=self._own or log is not None, only=self._only,
                                             weights=None if log is None else log.weights)
        if not workers:
            again(self, "unavailable", nobody(self._role, exchange.request.group))
            return
        if exchange.suspect is not None and exchange.suspect.deaths:
            workers = self.dispatcher.poison.admit(exchange.suspect, workers, self.start)
            if not workers:
                return  # It waits for its turn.
        try:
            self._reservation = self.dispatcher.place(self._role, workers, self._subject, exchange.request.group)
        except WorkerUnavailable as error:
            again(self, "unavailable", error)
            return
        worker = self._reservation.worker
        exchange.workers = (worker,)
        if exchange.suspect is not None:
            exchange.suspect.enter(worker)
        body = exchange.request.body if log is None else log.resumed_body()
        self._call = self.dispatcher.send(worker, exchange.request, body, self)
        if self._paused:
            self._call.pause()

    # ------------------------------------------------------------------ the worker's side

    def answer_head(self, head: AnswerHead) -> None:
        worker = self._reservation.worker  # type: ignore[union-attr]  # held while the call runs
        status = head.facts.status
        outcome = outcome_of(status)
        if status >= 400 or worker.circuit.troubled or self.retries is not None:
            self.dispatcher.on_status(worker, status, outcome, self.retries)
        exchange = self.exchange
        if exchange.began:
            self._answer_continued(head, outcome)
        elif outcome.retried and self._may_move_on(outcome):
            self._drop()
            again(self, f"status_{status}", nobody(self._role), at_once=outcome.busy)
        else:
            if outcome.busy:
                head.ask_to_wait()
            if not worker.is_baton:
                exchange.log = None
            elif exchange.log is not None:
                exchange.log.weights = worker.model_fingerprint
            exchange.begin(head)
            if exchange.log is None:
                self._subject = None  # No retry any more; a long stream need not hold its prompt.

    def _answer_continued(self, head: AnswerHead, outcome: Outcome) -> None:
        if head.starts_stream:
            self.exchange.go_on(head)
        else:
            untried = self._may_move_on(outcome)
            self._drop()
            again(self, f"continuation_status_{head.status}", nobody(self._role), at_once=untried and outcome.busy)

    def answer_data(self, data: bytes) -> None:
        self.exchange.relay(data)

    def answer_end(self, *, reusable: bool) -> None:
        ended(self, self._release(), self._role, reusable=reusable)

    def answer_lost(self, failure: Failure) -> None:
        lost(self, self._release(), self._role, failure, failure.reason)

    # ------------------------------------------------------------------ the client's side

    def cancel(self) -> None:
        if self.retries is not None:
            self.retries.cancel()
        self._drop()
        self.exchange.abandon()

    def expire(self, error: ServingError) -> None:
        if self.retries is not None:
            self.retries.cancel()
        at_boundary = self._call is not None and self._call.at_boundary
        self._drop()
        expired(self, error, at_boundary)

    def pause(self) -> None:
        self._paused = True
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        self._paused = False
        if self._call is not None:
            self._call.resume()

    # ------------------------------------------------------------------ inside

    def _may_move_on(self, outcome: Outcome) -> bool:
        assert self._reservation is not None
        retries = tried_on(self, self._reservation.worker, outcome, answered=True)
        return retries.allows(outcome) and self.dispatcher.untried(self._role, retries, self.exchange.request.group)

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
