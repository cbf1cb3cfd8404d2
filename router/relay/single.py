"""A request served by one worker."""

from __future__ import annotations

from ...common.api.errors import ServingError, WorkerUnavailable
from ..net.upstream import Call
from ..net.upstream_response import Failure, ResponseHead
from ..policies import Subject
from ..workers.registry import Reservation, Role, Worker
from .attempts import note_failed_attempt, on_attempt_complete, on_attempt_lost, on_expired, retry_or_fail
from .client_response import ClientResponse
from .dispatcher import Dispatcher, no_worker_error
from .retry import Outcome, Retries, outcome_of


class Relay:
    """One request's life on single workers: place, send, relay; before the first byte, retry.

    A failed connection is retried with backoff, first on workers that did not fail yet. A response that
    blames the worker is retried on such a worker, and relayed if there is none (``retry`` has the
    table). Silence is not retried: a client that waited --request-timeout-secs once is not made to
    wait six times.
    """

    __slots__ = ("dispatcher", "response", "_role", "_subject", "retries", "_reservation", "_call", "_paused",
                 "_baton_only", "_pinned", "_first")

    def __init__(self, dispatcher: Dispatcher, response: ClientResponse, role: Role, subject: Subject,
                 *, baton_only: bool = False, retries: Retries | None = None, pinned: Worker | None = None,
                 first: Worker | None = None):
        """``baton_only``: for our servers only; ``pinned``: for this worker only; ``first``: for this worker at the
        first attempt; ``retries``: of earlier attempts."""
        self.dispatcher = dispatcher
        self.response = response
        self._role = role
        self._subject = subject
        self._baton_only = baton_only
        self._pinned = pinned
        self._first = first
        self.retries = retries
        self._reservation: Reservation | None = None
        self._call: Call | None = None
        self._paused = False

    def start(self) -> None:
        """Make an attempt; answers 503 when no worker is available."""
        response = self.response
        if self.dispatcher.registry.hold and response.request.method in (b"POST", b"PUT"):
            self.dispatcher.hold.add(self)
            return
        log = response.log if response.began else None  # Of a stream that this attempt continues.
        workers = self.dispatcher.candidates(self._role, self.retries, response.request.group,
                                             baton_only=self._baton_only or log is not None,
                                             pinned=self._pinned or self._first,
                                             fingerprint=None if log is None else log.model_fingerprint)
        self._first = None
        if not workers:
            retry_or_fail(self, "unavailable", no_worker_error(self._role, response.request.group))
            return
        if response.suspect is not None and response.suspect.deaths:
            workers = self.dispatcher.poison.admit(response.suspect, workers, self.start)
            if not workers:
                return  # The guard calls ``start`` when a worker is free for it.
        try:
            self._reservation = self.dispatcher.place(self._role, workers, self._subject, response.request.group)
        except WorkerUnavailable as error:
            retry_or_fail(self, "unavailable", error)
            return
        worker = self._reservation.worker
        response.workers = (worker,)
        if response.suspect is not None:
            response.suspect.enter(worker)
        body = response.request.body if log is None else log.continuation_body()
        self._call = self.dispatcher.send(worker, response.request, body, self)
        if self._paused:
            self._call.pause()

    # ------------------------------------------------------------------ the worker's side

    def on_response_head(self, head: ResponseHead) -> None:
        worker = self._reservation.worker  # type: ignore[union-attr]  # there while the call runs
        status = head.facts.status
        outcome = outcome_of(status)
        if status >= 400 or worker.circuit.troubled or self.retries is not None:
            self.dispatcher.on_status(worker, status, outcome, self.retries)
        response = self.response
        if response.began:
            self._continue_stream(head, outcome)
        elif outcome.retried and self._note_error(outcome):
            self._drop()
            retry_or_fail(self, f"status_{status}", no_worker_error(self._role), at_once=outcome.busy)
        else:
            if outcome.busy:
                head.add_retry_after()
            response.begin(head, worker)
            if response.log is None:
                self._subject = None  # No retry any more; a long stream need not keep its prompt in memory.

    def _continue_stream(self, head: ResponseHead, outcome: Outcome) -> None:
        if head.starts_stream:
            self.response.continue_stream(head)
        else:
            untried = self._note_error(outcome)
            self._drop()
            retry_or_fail(self, f"continuation_status_{head.status}", no_worker_error(self._role),
                          at_once=untried and outcome.busy)

    def on_response_data(self, data: bytes) -> None:
        self.response.relay(data)

    def on_response_end(self, *, reusable: bool) -> None:
        on_attempt_complete(self, self._release(), self._role, reusable=reusable)

    def on_response_lost(self, failure: Failure) -> None:
        on_attempt_lost(self, self._release(), self._role, failure, failure.reason)

    # ------------------------------------------------------------------ the client's side

    def cancel(self) -> None:
        self.dispatcher.hold.leave(self)
        if self.retries is not None:
            self.retries.cancel()
        self._drop()
        self.response.abandon()

    def expire(self, error: ServingError) -> None:
        self.dispatcher.hold.leave(self)
        if self.retries is not None:
            self.retries.cancel()
        at_boundary = self._call is not None and self._call.at_boundary
        self._drop()
        on_expired(self, error, at_boundary)

    def pause(self) -> None:
        self._paused = True
        if self._call is not None:
            self._call.pause()

    def resume(self) -> None:
        self._paused = False
        if self._call is not None:
            self._call.resume()

    # ------------------------------------------------------------------ inside

    def _note_error(self, outcome: Outcome) -> bool:
        """Note that the worker answered with an error; returns whether another attempt may repair it."""
        assert self._reservation is not None
        retries = note_failed_attempt(self, self._reservation.worker, outcome, answered=True)
        return retries.allows(outcome) and self.dispatcher.has_untried(self._role, retries, self.response.request.group)

    def _drop(self) -> None:
        """Cancel the running attempt, if there is one."""
        if self._call is not None:
            self._call.cancel()
            self._release()

    def _release(self) -> Worker:
        """Release the reservation of the attempt, which is over; returns its worker."""
        reservation = self._reservation
        assert reservation is not None
        self._reservation = self._call = None
        reservation.release()
        return reservation.worker
