"""Flags of metrics, request logs, traces and the watchdog."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...api.errors import ConfigError
from ..cli import flag


@dataclass(frozen=True)
class ObserveArgs:
    sglang_metrics: bool = flag(True, help="export what SGLang measures too under its metrics' names as well")
    log_requests: bool = flag(False, help="log each request's beginning and end, as JSON")
    log_requests_level: Literal[0, 1, 2, 3] = flag(2, help=(
        "what --log-requests shows: 0 counts, 1 also sampling parameters, 2 also 2,048 ids of the prompt and "
        "characters of the answer, 3 all of them"))
    crash_dump_folder: str | None = flag(None, help=(
        "folder to which the requests of the last five minutes are written when the engine dies"))
    watchdog_timeout: float = flag(300.0, help=(
        "seconds after which a rank whose loop hangs prints its threads' stacks and ends (0: never)"))
    enable_trace: bool = flag(False, help="trace requests to --otlp-traces-endpoint")
    otlp_traces_endpoint: str | None = flag(None, help=(
        "OpenTelemetry collector: HOST:PORT (gRPC) or http://HOST:PORT/v1/traces; turns tracing on (default with "
        "--enable-trace: localhost:4317)"))

    def __post_init__(self) -> None:
        if self.watchdog_timeout < 0:
            raise ConfigError(f"--watchdog-timeout must be 0 or more, not {self.watchdog_timeout}.")

    @property
    def traces_to(self) -> str | None:
        """The collector; None without tracing."""
        return self.otlp_traces_endpoint or ("localhost:4317" if self.enable_trace else None)

    @property
    def log_level_of_requests(self) -> int | None:
        return self.log_requests_level if self.log_requests else None

    @property
    def dump_folder(self) -> Path | None:
        return None if self.crash_dump_folder is None else Path(self.crash_dump_folder).expanduser()
