"""One OpenTelemetry span a request, between the client's trace and the worker's (install the extra ``otel``).

Without --otlp-traces-endpoint nothing here is imported by a request: ``traceparent`` then passes
through like any header.
"""

from __future__ import annotations

from typing import Any

from ...common.obs.tracing import Tracing
from ..net.request import Request


class Tracer:
    """Makes the spans ``router.request``."""

    def __init__(self, exporter: Any, *, batch: bool = True):
        """Raises ConfigError where OpenTelemetry is not installed."""
        self._tracing = Tracing("baton-router", exporter, batch=batch)

    def begin(self, request: Request) -> RequestSpan:
        """Start a request's span, a child of the client's if it sent one, and forward it to the worker."""
        tracing = self._tracing
        context = tracing.context_of(request.traceparent.decode("latin-1") if request.traceparent else None)
        span = tracing.tracer.start_span("router.request", context, tracing.server_kind, {
            "http.request.method": request.method.decode("latin-1"), "url.path": request.path.decode("latin-1"),
            "baton.request_id": request.request_id.decode("latin-1")})
        request.headers += b"traceparent: " + tracing.traceparent_of(span).encode() + b"\r\n"
        return RequestSpan(span, tracing.failed)

    def close(self) -> None:
        """Export the remaining spans; waits for the collector as long as the exporter does."""
        self._tracing.close()


class RequestSpan:
    """The span of one request; ``end`` is called once."""

    __slots__ = ("_span", "_failed")

    def __init__(self, span: Any, failed: Any):
        self._span = span
        self._failed = failed

    def first_token(self) -> None:
        self._span.add_event("first_token")

    def end(self, route: str, status: int, worker: str, retries: int) -> None:
        self._span.set_attributes({"http.route": route, "http.response.status_code": status, "baton.worker": worker,
                                   "baton.retries": retries})
        if status >= 500:
            self._span.set_status(self._failed)
        self._span.end()
