"""The response of one relayed request to its client, whichever workers give it."""

from __future__ import annotations

import logging
from time import perf_counter

from ...common.api.errors import ServingError
from ...common.obs.failures import FailureLog
from ..admission.admission import Permit
from ..net.access import without_grants
from ..net.http_server import ClientConnection
from ..net.request import Request
from ..net.responses import Response, error_event, error_message
from ..net.upstream_response import Failure, ResponseHead
from ..obs.access_log import AccessLog
from ..obs.metrics import Metrics
from ..obs.tracing import RequestSpan
from ..workers.registry import Worker
from .continuation import DEAD_CODE, StreamLog
from .poison_guard import MAX_RETAINED_BODY_BYTES, Suspect

logger = logging.getLogger("baton.router")
failures = FailureLog(logger)
CLIENT_LEFT = 499


def note_failure(status: int, sentence: str, request: Request, **fields: str) -> None:
    """Log a request that failed."""
    failures.note(status, sentence, path=request.path.decode("latin-1"),
                  request_id=request.request_id.decode("latin-1"), **fields)


class ClientResponse:
    """One request and the response to its client, whichever worker gives it.

    Exactly one of ``end``, ``fail``, ``break_off`` and ``abandon`` finishes it: metrics and the access
    log are written there, and the connection is free for the next request.
    """

    __slots__ = ("connection", "request", "route", "retries", "workers", "began", "permit", "log", "suspect",
                 "begun_at", "_metrics", "_access_log", "_facts", "_awaits_body", "_num_chunks", "_last_chunk",
                 "_first_token_at", "_span")

    def __init__(self, connection: ClientConnection, request: Request, route: str, metrics: Metrics,
                 access_log: AccessLog | None, span: RequestSpan | None = None):
        self.connection = connection
        self.request = request
        self.route = route
        self.retries = 0
        self.workers: tuple[Worker, ...] = ()
        """Workers of the last attempt."""
        self.began = False
        """True once the first byte is on its way: from then on, nothing but a stream can be continued elsewhere."""
        self._metrics = metrics
        self._access_log = access_log
        self.begun_at = perf_counter()
        self._span = span
        self._awaits_body = True
        self._num_chunks = 0
        """Chunks of the body that were relayed; -1 for a response that came in one read."""
        self._first_token_at = 0.0
        self.permit: Permit | None = None
        self.log: StreamLog | None = None
        """The tokens of a stream that another worker can continue."""
        self.suspect: Suspect | None = None
        """Set once a worker died while it served the request; see ``poison``."""
        self._last_chunk = b""

    @property
    def worker(self) -> str:
        """The URLs of the last attempt's workers."""
        return " ".join([worker.url for worker in self.workers])

    def begin(self, head: ResponseHead, worker: Worker) -> None:
        """Relay a worker's head, and what came with it, adding the request id if the worker did not."""
        self.began = True
        request = self.request
        if len(request.body) > MAX_RETAINED_BODY_BYTES:
            request.body = b""  # Nothing is sent again.
        if request.on_head is not None:
            head = request.on_head(head)
        self._facts = facts = head.facts
        if facts.status >= 400:
            self._note(facts.status, error_message(head.data[head.size:]) or f"The worker answered {facts.status}.")
        if self.log is not None:
            self._begin_log(self.log, head, worker)
        data = head.data
        if head.complete and self._span is None:
            self._num_chunks = -1  # One clock reading is enough for a response that came in one read.
            if self.permit is not None:
                self.permit.first_token()
            if self.suspect is not None:
                self.suspect.on_first_byte()
        elif len(data) > head.size:
            self._last_chunk = data
            self._on_first_token()
        line = facts.line_size
        if request.reply_headers:
            added = b"" if facts.has_request_id else b"x-request-id: %b\r\n" % request.request_id
            data = b"".join((data[:line], added, request.reply_headers, without_grants(data[line - 2:head.size])[2:],
                             data[head.size:]))
        elif not facts.has_request_id:
            data = b"".join((data[:line], b"x-request-id: ", request.request_id, b"\r\n", data[line:]))
        self.connection.send(data)

    def _begin_log(self, log: StreamLog, head: ResponseHead, worker: Worker) -> None:
        """Log a stream of one of our servers, so that another one can continue it; drop the log for anything else."""
        if head.starts_stream and worker.is_baton:
            log.model_fingerprint = worker.model_fingerprint
            head.data = head.data[:head.size] + log.feed(head.data[head.size:])
        else:
            self.log = None

    def continue_stream(self, head: ResponseHead) -> None:
        """Relay a stream that another worker continues: the client has had its head."""
        self._awaits_body = True
        if len(head.data) > head.size:
            self.relay(head.data[head.size:])

    def end_broken(self, missing: bytes) -> None:
        """End a stream of which only ``missing``, its end, got lost."""
        self.log = None  # The incomplete chunk in it is dropped.
        self.connection.send(missing)
        self.end(reusable=True)

    def relay(self, data: bytes) -> None:
        """Relay a chunk of the body."""
        if self.log is not None:
            data = self.log.feed(data)
            if not data:
                return
        if self._awaits_body:
            self._on_first_token()
        self._num_chunks += 1
        self._last_chunk = data
        self.connection.send(data)

    @property
    def ends_with_death(self) -> bool:
        """True if a stream that cannot be continued ended with the news that its engine died."""
        return self.log is None and self._facts.event_stream and DEAD_CODE in self._last_chunk

    def end(self, *, reusable: bool) -> None:
        """Finish: the worker's response is complete."""
        if self.log is not None and (rest := self.log.flush()):
            self.connection.send(rest)
        facts = self._facts
        if self.suspect is not None and facts.status < 500 and not self.ends_with_death:
            self.suspect.clear()
        self._finish(facts.status)
        self.connection.done(keep_alive=reusable and facts.delimited and self.request.keep_alive)

    def fail(self, error: ServingError) -> None:
        """Finish with an error of the router's; nothing has been sent."""
        assert not self.began
        self.connection.respond(self.request, Response.error(error, self.request.path))
        self._note(error.status, error.message)
        self._finish(error.status)
        self.connection.done(keep_alive=self.request.keep_alive)

    def refuse(self, error: ServingError, at_boundary: bool) -> None:
        """Finish a request that killed workers with an error, whether its response has begun or not."""
        if self.began:
            self.break_off(error, Failure("poison", error.message.rstrip("."), at_boundary=at_boundary))
        else:
            self.fail(error)

    def break_off(self, error: ServingError, failure: Failure) -> None:
        """Finish a response that broke in the middle so that its reader notices.

        An event stream gets ``error`` as its last event, if an event can follow what was sent; without
        it, a reader that does not insist on [DONE] would take an incomplete response for a complete one.
        Any other response ends short of its announced length, or, if it announced none, with a reset.
        """
        self._metrics.broken_streams += 1
        self._note(error.status, f"{error.message} The response broke off: {failure.detail}.")
        facts = self._facts
        if facts.event_stream and (failure.at_boundary or self.log is not None):
            event = b"\n\n" + error_event(error, self.request.path)
            self.connection.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event) if facts.chunked else event)
        elif not facts.delimited:
            self.connection.reset()
        self._finish(facts.status)
        self.connection.done(keep_alive=False)

    def abandon(self) -> None:
        """Finish: the client left."""
        self._metrics.client_disconnects += 1
        self._finish(CLIENT_LEFT)

    def _note(self, status: int, sentence: str) -> None:
        note_failure(status, sentence, self.request, worker=self.worker)

    def _on_first_token(self) -> None:
        self._awaits_body = False
        if self.suspect is not None:
            self.suspect.on_first_byte()
        if self._first_token_at:
            return  # Another worker continues the stream.
        self._first_token_at = perf_counter()
        self._metrics.first_tokens[self.route].observe(self._first_token_at - self.begun_at)
        if self._span is not None:
            self._span.first_token()
        if self.permit is not None:
            self.permit.first_token()

    def _finish(self, status: int) -> None:
        seconds = perf_counter() - self.begun_at
        metrics, route = self._metrics, self.route
        metrics.requests[route, status] += 1
        bucket = metrics.durations[route].observe(seconds)
        if self._num_chunks < 0:
            first = metrics.first_tokens[route]
            first.counts[bucket] += 1
            first.total += seconds
        elif self._num_chunks > 1 and self._facts.event_stream:
            gap = (self.begun_at + seconds - self._first_token_at) / (self._num_chunks - 1)
            metrics.inter_tokens[route].observe(gap)
        if self.permit is not None:
            self.permit.release()
        if self.suspect is not None:
            self.suspect.finish()
        if self._span is not None:
            self._span.end(route, status, self.worker, self.retries)
        if self._access_log is not None:
            request = self.request
            self._access_log.note(request.method, request.path, status, seconds, request.request_id, self.workers,
                                  self.retries)
