"""Logging flags, the same for servers, routers and clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..api.errors import ConfigError
from .cli import flag


@dataclass(frozen=True)
class LogArgs:
    log_level: Literal["debug", "info", "warning", "warn", "error"] = flag(
        "info", help="least severe log level that is shown; a router's info has one line a request")
    log_json: bool = flag(False, help="write the log as JSON objects, one a line, instead of text")
    log_dir: str | None = flag(None, help=(
        "folder for log files, in addition to stderr; launch_cluster's processes log there alone"))
    log_max_mb: int = flag(100, help=(
        "size in MiB at which a log file of --log-dir is rotated; three older ones are kept (0: it grows)"))
    log_interval: float = flag(10.0, help=(
        "seconds between log lines about running requests and tokens, while there are any (0: never)"))

    def __post_init__(self) -> None:
        if self.log_max_mb < 0:
            raise ConfigError(f"--log-max-mb must be 0 or more, not {self.log_max_mb}.")
        if not self.log_interval >= 0:
            raise ConfigError(f"--log-interval must be 0 or more, not {self.log_interval:g}.")

    @property
    def max_bytes(self) -> int:
        """Largest log file in bytes; 0: no limit."""
        return self.log_max_mb << 20
