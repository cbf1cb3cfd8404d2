"""The log of failed requests: a warning for each, up to a rate."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

LINES = 20
WINDOW_SECONDS = 10.0
_MAX_CHARS = 500


class FailureLog:
    """Writes at most LINES warnings in WINDOW_SECONDS for failures of the server (status 500 and more), and as many for
    those of clients, who could otherwise fill the disk; the next line has the number of omitted ones. ``count`` counts
    all."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic):
        self.count = 0
        self._log = log
        self._clock = clock
        self._windows = {True: _Window(), False: _Window()}

    def note(self, status: int, sentence: str, **fields: str | int) -> None:
        """Logs a failed request; ``fields`` identify it."""
        self.count += 1
        window = self._windows[status >= 500]
        now = self._clock()
        if now >= window.ends:
            window.ends, window.written = now + WINDOW_SECONDS, 0
        if window.written >= LINES:
            window.omitted += 1
            return
        window.written += 1
        if window.omitted:
            fields["omitted_before"] = window.omitted
            window.omitted = 0
        text = sentence if len(sentence) <= _MAX_CHARS else sentence[:_MAX_CHARS] + "..."
        self._log.warning("A request failed: %s", text, extra={"fields": {"status": status, **fields}})


class _Window:
    """The lines written and omitted in one window."""

    def __init__(self) -> None:
        self.ends = 0.0
        self.written = 0
        self.omitted = 0
