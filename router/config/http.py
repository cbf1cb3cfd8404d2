"""Flags of the router's HTTP server."""

from __future__ import annotations

import dataclasses

from ...common.api.errors import ConfigError
from ...common.config.cli import flag
from .checks import not_negative


@dataclasses.dataclass(frozen=True)
class HttpArgs:
    host: str = flag("127.0.0.1", help="address to listen on")
    port: int = flag(30000, help="port to listen on (0: any free one)")
    max_payload_size: int = flag(512 * 2**20, help="largest request body in bytes; larger ones get 413")
    router_workers: int = flag(
        1, help="processes that accept on --port and decide as one, for more than one core's worth of traffic")
    busy_poll_us: float = flag(0.0, help=(
        "for this many microseconds after something arrived, poll the sockets instead of sleeping: lower latency, at "
        "the price of the core; 0: never"))
    request_timeout_secs: float = flag(1800.0, help="longest silence of a worker within one request; 0: no limit")
    client_timeout_secs: float = flag(300.0, help=(
        "close the connection of a client that reads nothing of a waiting answer for this long: it blocks a worker; "
        "0: never"))
    client_header_timeout_secs: float = flag(30.0, help=(
        "the head of a request must arrive this long after its first byte; 0: no limit"))
    client_body_timeout_secs: float = flag(60.0, help=(
        "all of a request must arrive this long after its first byte, and one second later for each 16 KiB of its "
        "body received; 0: no limit"))
    keep_alive_secs: float = flag(75.0, help="close a client's connection that is idle for this long; 0: never")
    request_id_headers: tuple[str, ...] = flag(
        ("x-request-id", "x-correlation-id", "x-trace-id", "request-id"), metavar="NAME",
        help="headers that may carry a request's id, the first found counts; workers see it as x-request-id")
    shutdown_grace_secs: float = flag(30.0, names=("--shutdown-grace-period-secs",),
                                      help="on SIGTERM or SIGINT, wait this long for running requests")

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}.")
        if self.max_payload_size < 1:
            raise ConfigError("--max-payload-size must be at least 1.")
        if not 1 <= self.router_workers <= 64:
            raise ConfigError(f"--router-workers must be between 1 and 64, not {self.router_workers}.")
        not_negative(self, "busy_poll_us", "request_timeout_secs", "client_timeout_secs", "keep_alive_secs",
                     "client_header_timeout_secs", "client_body_timeout_secs",
                     "shutdown_grace_secs")
