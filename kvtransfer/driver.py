"""Drives the core of a sender or receiver: a lock, a thread, the time and the effects."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from .io_thread import IOThread
from .protocol.timing import Timing


class Core(Protocol):
    """Protocol state without I/O, which asks for I/O through ``effects``, in order. Not thread-safe."""

    effects: deque[Any]
    counters: dict[str, float]

    def tick(self, now: float, stalled: float) -> None: ...

    def shut_down(self, now: float) -> None: ...


C = TypeVar("C", bound=Core)


class Driver(Generic[C]):
    """Runs a core from any thread and carries out its effects in the I/O thread.

    ``with driver as core:`` holds the lock, then wakes the I/O thread. The I/O thread itself takes ``lock`` alone. It
    runs ``work(stalled)`` as IOThread says, which calls ``tick`` and ``carry_out``; each effect is given to ``effect``
    without the lock.
    """

    def __init__(self, name: str, core: C, timing: Timing, work: Callable[[float], float | None],
                 effect: Callable[[Any], None]):
        self.core = core
        self.lock = threading.Lock()
        self.io = IOThread(name, work)
        self._timing = timing
        self._effect = effect
        self._next_tick = 0.0
        self._closed = False

    def __enter__(self) -> C:
        self.lock.acquire()
        return self.core

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.lock.release()
        if kind is None:
            self.io.wake()

    @property
    def counters(self) -> dict[str, float]:
        with self.lock:
            return dict(self.core.counters)

    def tick(self, stalled: float) -> None:
        """Ticks the core, when a tick is due."""
        now = time.monotonic()
        if stalled > self._timing.tick or now >= self._next_tick:
            self._next_tick = now + self._timing.tick
            with self.lock:
                self.core.tick(now, stalled)

    def carry_out(self) -> None:
        """Carries out all effects, and those that they cause."""
        while (effect := self._next_effect()) is not None:
            self._effect(effect)

    def stop(self) -> list[Any] | None:
        """Ends the thread and shuts the core down. Returns the remaining effects; None where it was stopped before."""
        if self._closed:
            return None
        self._closed = True
        self.io.stop()
        with self.lock:
            self.core.shut_down(time.monotonic())
            return list(self.core.effects)

    def _next_effect(self) -> Any:
        with self.lock:
            return self.core.effects.popleft() if self.core.effects else None
