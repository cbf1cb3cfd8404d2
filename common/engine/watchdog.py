"""Watchdog: ends a rank whose loop hangs, because an unnoticed hang is worse than a restart."""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("baton.engine")

EXIT_CODE = 14
_CHECKS_PER_TIMEOUT = 4


class Watchdog:
    """A thread that calls ``on_hang(seconds)`` once ``beat`` was not called for longer than ``timeout`` seconds, and
    ``on_stall(seconds)`` once at each silence of more than ``soft_timeout`` seconds. 0: never."""

    def __init__(self, timeout: float, on_hang: Callable[[float], None] | None = None, *, soft_timeout: float = 0,
                 on_stall: Callable[[float], None] | None = None):
        self._timeout = timeout or float("inf")
        self._soft_timeout = soft_timeout or float("inf")
        self._on_hang = on_hang or _end_process
        self._on_stall = on_stall or _show_threads
        self._last = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        """Record the start of an iteration of the loop."""
        self._last = time.monotonic()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the watchdog while an operation runs that may take long."""
        self._last = float("inf")
        try:
            yield
        finally:
            self.beat()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        reported = 0.0  # the beat before the stall that was reported last
        while not self._stop.wait(min(self._timeout, self._soft_timeout) / _CHECKS_PER_TIMEOUT):
            last = self._last
            silent = time.monotonic() - last
            if silent > self._timeout:
                self._on_hang(silent)
                return
            if silent > self._soft_timeout and last != reported:
                reported = last
                self._on_stall(silent)


def _end_process(silent: float) -> None:
    """Write the stacks of all threads to stderr and exit; the API server then reports the rank's death, and ends."""
    log.critical("the engine's loop has hung for %.0f s (--watchdog-timeout); its threads:", silent)
    logging.shutdown()
    _write_stacks()
    os._exit(EXIT_CODE)


def _show_threads(silent: float) -> None:
    log.error("the engine's loop has stalled for %.1f s (--soft-watchdog-timeout); its threads:", silent)
    _write_stacks()


def _write_stacks() -> None:
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sys.stderr.flush()
