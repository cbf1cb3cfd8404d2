"""A bar on a terminal for a stage of starting."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 24
_DRAW_SECONDS = 0.1


class ProgressBar:
    """Draws a bar on stderr where that is a terminal and ``enabled``, else nothing: then logs have lines."""

    def __init__(self, *, enabled: bool = True, stream: TextIO | None = None,
                 clock: Callable[[], float] = time.monotonic):
        self._stream = stream or sys.stderr
        self._live = enabled and self._stream.isatty()
        self._clock = clock
        self._stage, self._began, self._drawn_at = "", 0.0, 0.0
        self._is_drawn = False

    def draw(self, stage: str, fraction: float) -> None:
        """Shows that a fraction, 0 to 1, of a stage is done; a few times a second at most."""
        now = self._clock()
        if stage != self._stage:
            self._stage, self._began, self._drawn_at = stage, now, -_DRAW_SECONDS
        if not self._live or (now - self._drawn_at < _DRAW_SECONDS and fraction < 1):
            return
        self._drawn_at = now
        elapsed = now - self._began
        left = f", {elapsed / fraction * (1 - fraction):.0f} s left" if 0 < fraction < 1 and elapsed >= 1 else ""
        self._stream.write(f"\r\x1b[2K{stage} [{'#' * round(fraction * _WIDTH):.<{_WIDTH}}] {100 * fraction:.0f} %"
                           f", {elapsed:.0f} s{left}")
        self._stream.flush()
        self._is_drawn = True

    def clear(self) -> None:
        """Clears the bar, so that a line of the log takes its row."""
        if self._is_drawn:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._is_drawn = False
