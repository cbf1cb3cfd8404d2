"""The client's side of one relayed request: what it has been sent, and how its answer ends."""

from __future__ import annotations

import logging
from time import perf_counter

from ...common.api.errors import ServingError
from ...common.obs.failures import FailureLog
from ..admission.admission import Permit
from ..net.access import without_grants
from ..net.http_server import ClientConnection
from ..net.request import Request
from ..net.responses import Response, error_event, said
from ..net.upstream_answer import AnswerHead, Failure
from ..obs.access_log import AccessLog
from ..obs.metrics import Metrics
from ..obs.tracing import RequestSpan
from ..workers.registry import Worker
from .continuation import DEAD_CODE, StreamLog
from .poison_guard import KEPT_BODY_BYTES, Suspect

logger = logging.getLogger("baton.router")
failures = FailureLog(logger)
CLIENT_LEFT = 499


def note_failure(status: int, sentence: str, request: Request, **fields: str) -> None:
    """Tell the log of a request that failed."""
    failures.note(status, sentence, path=request.path.decode("latin-1"),
                  request_id=request.request_id.decode("latin-1"), **fields)


class ClientResponse:
    """One request and its answer, whichever worker gives it.

    Exactly one of ``end``, ``fail``, ``break_off`` and ``abandon`` finishes it: metrics and the access
    log are written there, and the connection is free for the next request.
    """

    __slots__ = ("connection", "request", "route", "retries", "workers", "began", "ticket", "log", "suspect",
                 "begun_at", "_metrics", "_access_log", "_facts", "_awaits_body", "_pieces", "_last", "_first_at",
                 "_span")

    def __init__(self, connection: ClientConnection, request: Request, route: str, metrics: Metrics,
                 access_log: AccessLog | None, span: RequestSpan | None = None):
        self.connection = connection
        self.request = request
        self.route = route
        self.retries = 0
        self.workers: tuple[Worker, ...] = ()
        """Those of the last attempt."""
        self.began = False
        """Whether the first byte is on its way: from then on nothing can be retried."""
        self._metrics = metrics
        self._access_log = access_log
        self.begun_at = perf_counter()
        self._span = span
        self._awaits_body = True
        self._pieces = 0
        self._first_at = 0.0
        self.ticket: Permit | None = None
        self.log: StreamLog | None = None
        self.suspect: Suspect | None = None
        """What it is once a worker died under it; see ``poison``."""
        self._last = b""

    @property
    def worker(self) -> str:
        """The URLs of the last attempt's workers."""
        return " ".join([worker.url for worker in self.workers])

    def begin(self, head: AnswerHead) -> None:
        """Relay a head, and what came with it, adding the request id where the worker did not."""
        self.began = True
        request = self.request
        if len(request.body) > KEPT_BODY_BYTES:
            request.body = b""  # Nothing is sent again.
        if request.on_head is not None:
            head = request.on_head(head)
        self._facts = facts = head.facts
        if facts.status >= 400:
            self._note(facts.status, said(head.data[head.size:]) or f"The worker answered {facts.status}.")
        if self.log is not None:
            self._follow(self.log, head)
        data = head.data
        if head.whole and self._span is None:
            self._pieces = -1  # One clock reading is enough for an answer that came at once.
            if self.ticket is not None:
                self.ticket.first_token()
            if self.suspect is not None:
                self.suspect.answered()
        elif len(data) > head.size:
            self._last = data
            self._first_token()
        line = facts.line_size
        if request.reply_headers:
            added = b"" if facts.names_request else b"x-request-id: %b\r\n" % request.request_id
            data = b"".join((data[:line], added, request.reply_headers, without_grants(data[line - 2:head.size])[2:],
                             data[head.size:]))
        elif not facts.names_request:
            data = b"".join((data[:line], b"x-request-id: ", request.request_id, b"\r\n", data[line:]))
        self.connection.send(data)

    def _follow(self, log: StreamLog, head: AnswerHead) -> None:
        """Keep what is needed to go on with a stream elsewhere; of any other answer, nothing."""
        if head.starts_stream:
            head.data = head.data[:head.size] + log.take(head.data[head.size:])
        else:
            self.log = None

    def go_on(self, head: AnswerHead) -> None:
        """Relay a stream that goes on elsewhere: the client has had its head."""
        self._awaits_body = True
        if len(head.data) > head.size:
            self.relay(head.data[head.size:])

    def end_broken(self, missing: bytes) -> None:
        """End a stream of which nothing but the end got lost."""
        self.log = None  # what it holds back was torn
        self.connection.send(missing)
        self.end(reusable=True)

    def relay(self, data: bytes) -> None:
        """Relay a piece of the body."""
        if self.log is not None:
            data = self.log.take(data)
            if not data:
                return
        if self._awaits_body:
            self._first_token()
        self._pieces += 1
        self._last = data
        self.connection.send(data)

    @property
    def ends_with_death(self) -> bool:
        """Whether the answer, a stream that cannot go on elsewhere, told last that its engine died."""
        return self.log is None and self._facts.event_stream and DEAD_CODE in self._last

    def end(self, *, reusable: bool) -> None:
        """The worker's answer is complete."""
        if self.log is not None and (rest := self.log.rest()):
            self.connection.send(rest)
        facts = self._facts
        if self.suspect is not None and facts.status < 500 and not self.ends_with_death:
            self.suspect.cleared()
        self._finish(facts.status)
        self.connection.done(keep_alive=reusable and facts.delimited and self.request.keep_alive)

    def fail(self, error: ServingError) -> None:
        """Answer with an error of our own; nothing has been sent."""
        assert not self.began
        self.connection.respond(self.request, Response.error(error, self.request.path))
        self._note(error.status, error.message)
        self._finish(error.status)
        self.connection.done(keep_alive=self.request.keep_alive)

    def refuse(self, error: ServingError, at_boundary: bool) -> None:
        """End the request, whether its answer has begun or not, for what it did to workers."""
        if self.began:
            self.break_off(error, Failure("poison", error.message.rstrip("."), at_boundary=at_boundary))
        else:
            self.fail(error)

    def break_off(self, error: ServingError, failure: Failure) -> None:
        """End an answer that broke in the middle so that its reader can tell.

        An event stream gets ``error`` as its last event, if an event can follow what was sent; without
        it, a reader that does not insist on [DONE] would take a torn answer for a whole one. Any other
        answer is cut short of its announced length, or, where it announced none, by a reset.
        """
        self._metrics.broken_streams += 1
        self._note(error.status, f"{error.message} The answer broke off: {failure.detail}.")
        facts = self._facts
        if facts.event_stream and (failure.at_boundary or self.log is not None):
            event = b"\n\n" + error_event(error, self.request.path)
            self.connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if facts.chunked else event)
        elif not facts.delimited:
            self.connection.reset()
        self._finish(facts.status)
        self.connection.done(keep_alive=False)

    def abandon(self) -> None:
        """The client left."""
        self._metrics.client_disconnects += 1
        self._finish(CLIENT_LEFT)

    def _note(self, status: int, sentence: str) -> None:
        note_failure(status, sentence, self.request, worker=self.worker)

    def _first_token(self) -> None:
        self._awaits_body = False
        if self.suspect is not None:
            self.suspect.answered()
        if self._first_at:
            return  # Of a stream that goes on elsewhere.
        self._first_at = perf_counter()
        self._metrics.first_tokens[self.route].observe(self._first_at - self.begun_at)
        if self._span is not None:
            self._span.first_token()
        if self.ticket is not None:
            self.ticket.first_token()

    def _finish(self, status: int) -> None:
        seconds = perf_counter() - self.begun_at
        metrics, route = self._metrics, self.route
        metrics.requests[route, status] += 1
        bucket = metrics.durations[route].observe(seconds)
        if self._pieces < 0:
            first = metrics.first_tokens[route]
            first.counts[bucket] += 1
            first.total += seconds
        elif self._pieces > 1 and self._facts.event_stream:
            gap = (self.begun_at + seconds - self._first_at) / (self._pieces - 1)
            metrics.inter_tokens[route].observe(gap)
        if self.ticket is not None:
            self.ticket.finished()
        if self.suspect is not None:
            self.suspect.over()
        if self._span is not None:
            self._span.end(route, status, self.worker, self.retries)
        if self._access_log is not None:
            request = self.request
            self._access_log.note(request.method, request.path, status, seconds, request.request_id, self.workers,
                                  self.retries)
