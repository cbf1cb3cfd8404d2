"""Progress of a run: a bar on a terminal, a line every 15 s elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24
_BAR_SECONDS = 0.1
_LINE_SECONDS = 15.0


class Progress:
    """Counts to ``total``. Writes to stderr, so that what a command prints can be piped on."""

    def __init__(self, what: str, total: int, *, disabled: bool = False, stream: TextIO | None = None,
                 clock: Callable[[], float] = time.monotonic):
        self._what = what
        self._total = total
        self._disabled = disabled
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._clock = clock
        self._begin = self._shown = clock()
        self._drawn = ""
        self.done = 0

    def advance(self, note: str = "") -> None:
        """Count one more; ``note`` is shown after the count."""
        self.done += 1
        now = self._clock()
        if not self._disabled and now - self._shown >= (_BAR_SECONDS if self._live else _LINE_SECONDS):
            self._shown = now
            self._draw(note, now)

    def _draw(self, note: str, now: float) -> None:
        elapsed = now - self._begin
        left = elapsed / self.done * (self._total - self.done)
        share = self.done / self._total
        line = (f"{self._what} [{'#' * round(share * _WIDTH):.<{_WIDTH}}] {self.done}/{self._total} "
                f"{_clock_time(elapsed)}<{_clock_time(left)}{note and '  ' + note}")
        self._stream.write(f"\r\x1b[2K{line}" if self._live else line + "\n")
        self._stream.flush()
        self._drawn = line

    def close(self) -> None:
        """Clear the bar, so that the next line takes its row."""
        if self._live and self._drawn:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()


def _clock_time(seconds: float) -> str:
    return f"{int(seconds) // 60:02}:{int(seconds) % 60:02}"
