"""Flags of the router's metrics and traces."""

from __future__ import annotations

import dataclasses

from ...common.config.cli import flag


@dataclasses.dataclass(frozen=True)
class ObserveArgs:
    prometheus_port: int | None = flag(None, help="serve /metrics on this port too")
    prometheus_host: str = flag("0.0.0.0", help="address of --prometheus-port")
    enable_trace: bool = flag(False, help="trace requests to --otlp-traces-endpoint")
    otlp_traces_endpoint: str | None = flag(
        None, help="OpenTelemetry collector: HOST:PORT (gRPC) or http://HOST:PORT/v1/traces; turns tracing on "
                   "(default with --enable-trace: localhost:4317)")

    @property
    def traces_to(self) -> str | None:
        """The collector; None without tracing."""
        return self.otlp_traces_endpoint or ("localhost:4317" if self.enable_trace else None)
