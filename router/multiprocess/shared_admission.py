"""Admission over all processes of a router: the same limits, exact, with the counts in shared memory.

Far from the limit no lock is taken. A child counts its request first and reads the sum then. All that it may fail to
see is one request of each other child that does so in the same instant, so it continues while that many more may run.
Else, and where rates or keys have limits, it decides under the lock.

A request waits in its own process. When one ends, the first of all that wait may run, by priority, then by arrival:
its process is signalled. Where requests of two processes end at once, the order of equals may be the other one.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from ...common.api.errors import ServingError
from ..admission.admission import Admission, Permit, Waiting
from ..admission.limits import KeyShare, TokenBucket, TtftEstimate
from ..config.admission import AdmissionRules
from .shared_keys import KeyTable
from .shared_stats import HEAD_PRIORITY, HEAD_SINCE, LEVEL, PACE, TTFT_WAITING, SharedCount, SharedStats

_POLL_SECONDS = 0.05
"""Between two looks at the counts while requests wait: a process may die after it ended one, before it signals."""
_MAX_PRIORITY = 2**62


class SharedTtftState:
    """Requests of all processes that wait for their first token, and the pace that all have seen."""

    __slots__ = ("_count", "_common")

    def __init__(self, stats: SharedStats, child: int):
        self._count = SharedCount([stats.cells(other) for other in range(stats.count)], child, TTFT_WAITING)
        self._common = stats.common

    @property
    def waiting(self) -> int:
        return self._count.value

    @waiting.setter
    def waiting(self, waiting: int) -> None:
        self._count.value = waiting

    @property
    def pace(self) -> float:
        return self._common[PACE]

    @pace.setter
    def pace(self, pace: float) -> None:
        self._common[PACE] = pace


class SharedAdmissionState:
    """The numbers of admission over all processes; all but ``head_changed`` needs the lock to be exact."""

    __slots__ = ("ttft", "bucket", "_running", "_queued", "_keys", "_cells")

    def __init__(self, stats: SharedStats, child: int, rules: AdmissionRules, now: float):
        self.ttft = TtftEstimate(SharedTtftState(stats, child))
        self.bucket: TokenBucket | None = None
        if rules.rate:
            with stats.lock:
                self.bucket = TokenBucket(rules.rate, now, stats.common[LEVEL:LEVEL + 2])
        self._running = SharedCount(_singles(stats.running), child, 0)
        self._queued = SharedCount(_singles(stats.queued), child, 0)
        self._keys = KeyTable(stats, child, rules.rate_per_key)
        self._cells = stats.cells(child)

    @property
    def running(self) -> int:
        return self._running.value

    @running.setter
    def running(self, running: int) -> None:
        self._running.value = running

    @property
    def queued(self) -> int:
        return self._queued.value

    @queued.setter
    def queued(self, queued: int) -> None:
        self._queued.value = queued

    def share_of(self, key: bytes, now: float) -> KeyShare | None:
        return self._keys.find(key, now)

    def head_changed(self, head: Waiting | None) -> None:
        """Publishes the request of this process that is the first to run."""
        if head is not None:
            self._cells[HEAD_PRIORITY], self._cells[HEAD_SINCE] = -head.priority, int(head.since * 1e6)


class SharedAdmission:
    """One child's admission. Writing to one of ``signals``, the children's event descriptors, makes that child start
    what may run."""

    def __init__(self, rules: AdmissionRules, loop: asyncio.AbstractEventLoop, stats: SharedStats, child: int,
                 signals: Sequence[int]):
        self.rules = rules
        self._stats = stats
        self._child = child
        self._loop = loop
        self._signals = signals
        self._admission = Admission(rules, loop.time, state=SharedAdmissionState(stats, child, rules, loop.time()),
                                    on_release=self._release)
        self.refused = self._admission.refused
        self.ttft = self._admission.ttft
        self._cells = [stats.cells(other) for other in range(stats.count)]
        self._running, self._queued = stats.running, stats.queued
        self._safe = rules.max_concurrent - (stats.count - 1)
        self._starting = False
        self._timer: asyncio.TimerHandle | None = None
        loop.add_reader(signals[child], self._on_signal)

    @property
    def running(self) -> int:
        return self._admission.running

    @property
    def queued(self) -> int:
        return self._admission.queued

    def close(self) -> None:
        self._loop.remove_reader(self._signals[self._child])
        if self._timer is not None:
            self._timer.cancel()

    def try_acquire(self) -> Permit | None:
        """Lets a request run where the total alone is limited, and safely far; None: ``acquire`` decides."""
        immediate = self._admission.immediate
        if immediate is not None:
            running = self._running
            running[self._child] += 1
            if sum(running) <= self._safe and not sum(self._queued):
                return immediate
            running[self._child] -= 1
        return None

    def acquire(self, key: bytes, streamed: bool, priority: Callable[[], int], start: Callable[[Permit], None],
                refuse: Callable[[ServingError], None], *, slo: float = 0.0, load: int = 1) -> Permit | Waiting:
        """``Admission.acquire`` over all processes."""
        permit = self.try_acquire()
        if permit is not None:
            return permit
        with self._stats.lock:
            result = self._admission.acquire(key, streamed, lambda: _bounded(priority()), start, refuse,
                                             slo=slo, load=load)
        if isinstance(result, Waiting):  # The request that seemed to be the last to run may have been refused itself.
            self._loop.call_soon(self._start_waiting)
            self._poll_later()
        return result

    def expire(self) -> float | None:
        return self._admission.expire()

    # ------------------------------------------------------------------ inside

    def _release(self) -> None:
        self._running[self._child] -= 1
        if sum(self._queued):
            self._start_waiting()

    def _first_child(self) -> int:
        """The child whose first waiting request is the first of all; this one where none waits."""
        heads = [(cells[HEAD_PRIORITY], cells[HEAD_SINCE], child) for child, cells in enumerate(self._cells)
                 if self._queued[child]]
        return min(heads)[2] if heads else self._child

    def _start_waiting(self) -> None:
        """Starts waiting requests while more may run; where another process has the first, it is signalled."""
        if self._starting:  # A request that fails at once ends within start(): the loop continues.
            return
        self._starting = True
        try:
            while sum(self._queued):
                child = self._first_child()
                if child != self._child:
                    os.eventfd_write(self._signals[child], 1)
                    return
                waiting = self._take_first()
                if waiting is None:
                    return
                waiting.start(waiting.permit)
        finally:
            self._starting = False

    def _take_first(self) -> Waiting | None:
        """Moves the first request that waits here to those that run, where one more may."""
        with self._stats.lock:
            if not self._queued[self._child] or sum(self._running) >= self.rules.max_concurrent:
                return None
            return self._admission.take_first()

    def _on_signal(self) -> None:
        os.eventfd_read(self._signals[self._child])
        self._start_waiting()

    def _poll_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_POLL_SECONDS, self._poll)

    def _poll(self) -> None:
        self._timer = None
        self._start_waiting()
        if self._queued[self._child]:
            self._poll_later()


def _singles(words: memoryview) -> list[memoryview]:
    return [words[child:child + 1] for child in range(len(words))]


def _bounded(priority: int) -> int:
    return max(-_MAX_PRIORITY, min(priority, _MAX_PRIORITY))
