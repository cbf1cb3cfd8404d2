"""One OpenTelemetry span a request, between the client's trace and the worker's (install the extra ``otel``).

Without --otlp-traces-endpoint nothing here is imported by a request: ``traceparent`` then passes
through like any header.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..common.api.errors import ConfigError
from .request import Request

if TYPE_CHECKING:
    from .exchange import Exchange

_MISSING = "--otlp-traces-endpoint needs OpenTelemetry: pip install 'baton-serve[otel]'."


class Tracer:
    """Makes the spans ``router.request`` and exports them in the background, in batches."""

    def __init__(self, exporter: Any, *, batch: bool = True):
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(_MISSING) from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": "baton-router"}))
        self._provider.add_span_processor((BatchSpanProcessor if batch else SimpleSpanProcessor)(exporter))
        self._tracer = self._provider.get_tracer("baton.router")
        self._propagator = TraceContextTextMapPropagator()
        self._kind = trace.SpanKind.SERVER
        self._in_span = trace.set_span_in_context
        self._failed = trace.Status(trace.StatusCode.ERROR)

    def begin(self, request: Request) -> RequestSpan:
        """Start a request's span, a child of the client's if it named one; the worker is told of ours."""
        given = {"traceparent": request.traceparent.decode("latin-1")} if request.traceparent else {}
        span = self._tracer.start_span("router.request", self._propagator.extract(given), self._kind, {
            "http.request.method": request.method.decode("latin-1"), "url.path": request.path.decode("latin-1"),
            "baton.request_id": request.request_id.decode("latin-1")})
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._in_span(span))
        request.headers += b"traceparent: " + carrier["traceparent"].encode() + b"\r\n"
        return RequestSpan(span, self._failed)

    def close(self) -> None:
        """Export what is left; waits for the collector at most as long as the exporter does."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request, ended once with what its exchange knows."""

    __slots__ = ("_span", "_failed")

    def __init__(self, span: Any, failed: Any):
        self._span = span
        self._failed = failed

    def first_token(self) -> None:
        self._span.add_event("first_token")

    def end(self, exchange: Exchange, status: int) -> None:
        self._span.set_attributes({"http.route": exchange.route, "http.response.status_code": status,
                                   "baton.worker": exchange.worker, "baton.retries": exchange.retries})
        if status >= 500:
            self._span.set_status(self._failed)
        self._span.end()


def exporter_for(endpoint: str) -> Any:
    """``http(s)://HOST:PORT/PATH`` -> OTLP over HTTP; ``[http(s)://]HOST:PORT`` -> OTLP over gRPC."""
    try:
        _, separator, rest = endpoint.partition("://")
        if separator and rest.rstrip("/").count("/"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            return Http(endpoint=endpoint, timeout=5)
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

        return Grpc(endpoint=endpoint, insecure=not endpoint.startswith("https://"), timeout=5)
    except ImportError:
        raise ConfigError(_MISSING) from None
