"""OpenTelemetry for all processes (install the extra ``otel``); imported only by those that trace."""

from __future__ import annotations

from typing import Any

from ..api.errors import ConfigError
from ..config.packages import install

_MISSING = f"--otlp-traces-endpoint needs OpenTelemetry: {install('otel')}."


class Tracing:
    """A process's tracer: spans are exported in the background, in batches. Raises ConfigError where OpenTelemetry is
    not installed."""

    def __init__(self, service: str, exporter: Any, *, batch: bool = True):
        """``service`` names the spans' process; without ``batch`` each span is exported as it ends."""
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError:
            raise ConfigError(_MISSING) from None
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}))
        self._provider.add_span_processor((BatchSpanProcessor if batch else SimpleSpanProcessor)(exporter))
        self._propagator = TraceContextTextMapPropagator()
        self._in_span = trace.set_span_in_context
        self.tracer = self._provider.get_tracer(service)
        self.server_kind = trace.SpanKind.SERVER
        self.failed = trace.Status(trace.StatusCode.ERROR)

    def context_of(self, traceparent: str | None) -> Any:
        """The context of a peer's ``traceparent`` header; an empty one without it."""
        return self._propagator.extract({"traceparent": traceparent} if traceparent else {})

    def within(self, span: Any) -> Any:
        """The context of a span's children."""
        return self._in_span(span)

    def traceparent_of(self, span: Any) -> str:
        """The ``traceparent`` header of a span, for requests to peers."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._in_span(span))
        return carrier["traceparent"]

    def close(self) -> None:
        """Exports the remaining spans; waits for the collector at most as long as the exporter does."""
        self._provider.shutdown()


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
