"""Flags of the HTTP server."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Literal

from ...api.errors import ConfigError
from ..cli import flag
from ..rules import at_least


@dataclass(frozen=True)
class HttpArgs:
    host: str = flag("127.0.0.1", help="address to listen on; also the one at which peers reach this server's ranks")
    port: int = flag(30000, help="HTTP port")
    api_key: str | None = flag(None, help="bearer token that clients must send")
    admin_api_key: str | None = flag(None, help=(
        "bearer token that endpoints which change the server ask for; it opens all others, too"))
    tokenizer_worker_num: int = flag(1, help=(
        "processes that accept on the port, and check, tokenize, detokenize and stream requests beside one engine"))
    max_payload_size: int = flag(32 * 1024 * 1024, help=(
        "largest request body in bytes; uploaded files may have 512 MiB"))
    shutdown_grace_secs: float = flag(20.0, help=(
        "seconds that running requests have after SIGTERM or SIGINT; a second signal ends the wait"))
    client_header_timeout_secs: float = flag(30.0, help=(
        "seconds within which the head of a connection's first request must arrive; 0: no limit"))
    client_body_timeout_secs: float = flag(60.0, help=(
        "seconds within which a request's body must arrive; one more for each 16 KiB received; 0: no limit"))
    log_level_http: Literal["debug", "info", "warning", "error"] | None = flag(None, help=(
        "least severe level of the HTTP log; info has a line for each request (by default none are written)"))
    uvicorn_access_log_exclude_prefixes: tuple[str, ...] = flag((), metavar="PREFIX", help=(
        "beginnings of paths whose requests the HTTP log of --log-level-http leaves out, as /health /metrics"))
    fastapi_root_path: str = flag("", metavar="PREFIX", help=(
        "path before those of the API, where a proxy sends requests on with it: /PREFIX/v1/models; paths without it "
        "are served as well"))
    stream_interval: int = flag(1, help="tokens that are gathered into one event of a stream")

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}.")
        at_least(self, 1, "stream_interval", "max_payload_size", "tokenizer_worker_num")
        if self.fastapi_root_path and not re.fullmatch(r"(/[\w.~-]+)+/?", self.fastapi_root_path):
            raise ConfigError(f"--fastapi-root-path must be a path as /prefix, not {self.fastapi_root_path!r}.")
        if self.uvicorn_access_log_exclude_prefixes and self.log_level_http is None:
            raise ConfigError("--uvicorn-access-log-exclude-prefixes is about the HTTP log, which is off: "
                              "give --log-level-http info too.")
        if self.tokenizer_worker_num > 1 and sys.platform != "linux":
            raise ConfigError("--tokenizer-worker-num above 1 needs Linux (SO_REUSEPORT).")
        for name in ("shutdown_grace_secs", "client_header_timeout_secs", "client_body_timeout_secs"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(self, name):g}.")
