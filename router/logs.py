"""Log lines as JSON objects, one a line, on stderr."""

from __future__ import annotations

import logging
import sys
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from ..common.api.errors import ConfigError


class JsonFormatter(logging.Formatter):
    """``time``, ``level`` and ``message``, then what the record brings in ``extra={"fields": {...}}``."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "message": record.getMessage(),
                **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(level: str, folder: str | None = None) -> None:
    """Send the router's log to stderr from ``level`` on, and to ``folder``/router.log; raises ConfigError."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if folder is not None:
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            handlers.append(logging.FileHandler(Path(folder) / "router.log", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"Cannot write to --log-dir {folder}: {error.strerror}.") from None
    for handler in handlers:
        handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("baton.router")
    logger.handlers[:] = handlers
    logger.propagate = False
    logger.setLevel({"warn": "WARNING"}.get(level, level.upper()))
