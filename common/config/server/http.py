"""The HTTP front."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from ...api.errors import ConfigError
from ..cli import flag


@dataclass(frozen=True)
class HttpArgs:
    host: str = flag("127.0.0.1", help="address to listen on; also the one that peers reach this server's ranks at")
    port: int = flag(30000, help="HTTP port")
    api_key: str | None = flag(None, help="key that clients must send as a bearer token")
    admin_api_key: str | None = flag(None, help=(
        "key that endpoints which change the server ask for in place of --api-key"))
    max_payload_size: int = flag(32 * 1024 * 1024, help=(
        "largest request body in bytes; uploaded files may have 512 MiB"))
    shutdown_grace_secs: float = flag(20.0, help=(
        "seconds that running requests may go on after SIGTERM or SIGINT; a second signal ends the wait"))
    client_header_timeout_secs: float = flag(30.0, help=(
        "seconds within which the first request of a connection must have a head; 0: no limit"))
    client_body_timeout_secs: float = flag(60.0, help=(
        "seconds within which a request's body must be there; one more for each 16 KiB that have come; 0: no limit"))
    stream_interval: int = flag(1, help="tokens that a stream gathers before it sends an event")

    @property
    def shown_url(self) -> str:
        """What peers' logs call this server."""
        host = socket.gethostname() if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def __post_init__(self) -> None:
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}.")
        for name in ("shutdown_grace_secs", "client_header_timeout_secs", "client_body_timeout_secs"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name.replace('_', '-')} must be 0 or more, not {getattr(self, name):g}.")
