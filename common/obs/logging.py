"""One log format for every process: time, level, component, message on one line."""

from __future__ import annotations

import logging
import sys

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_NOISY = ("asyncio", "aiohttp.access", "filelock", "httpx", "httpcore", "huggingface_hub", "transformers", "urllib3")
_ROOT = "baton"


class _OneLine(logging.Formatter):
    """Line breaks inside a message are shown as ``\\n``, so that a log line is one event; tracebacks follow below."""

    def __init__(self, component: str):
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {component}: %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = record.message.replace("\n", "\\n")
        return super().formatMessage(record)


def setup_logging(level: str, component: str) -> None:
    """Send this process's log to stderr; ``component`` names the part (``router``, ``prefill.rank0``).

    ``level`` is debug, info, warning or error and holds for our own loggers (``baton.…``); libraries are shown
    from warning on. Calling it again replaces the former setup.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(component))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger(_ROOT).setLevel(_LEVELS[level])
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
