"""Admission over all processes of a router: the same limits, exact, with the counts on the board.

Far from the limit no lock is taken. A child counts its request first and reads the sum then; what it may fail to see
is one request of each other child that does so in the same instant, so it goes ahead while as many places are left.
Else, and where rates or keys have limits, it decides under the lock.

Whoever waits does so in its own process. A place that comes free goes to the first of all that wait, by priority, then
by arrival: its process is signalled. Where two processes let go at once, the order of equals may be the other one.
"""

from __future__ import annotations

import asyncio
import heapq
import os
from collections.abc import Callable, Sequence

from ...common.api.errors import ServingError
from ..admission.admission import Admission, AdmissionRules, Permit, TtftEstimate, Waiting, _Key
from .shared_bucket import SharedBucket
from .shared_keys import KeyTable
from .shared_stats import HEAD_PRIORITY, HEAD_SINCE, LEVEL, PACE, TTFT_WAITING, SharedCount, SharedStats

_LOOK_SECONDS = 0.05
"""How often those that wait look for a place by themselves: a process may die between freeing one and saying so."""
_MOST_PRIORITY = 2**62


class SharedEstimate(TtftEstimate):
    """Who waits for a first token anywhere, and the pace that all have seen."""

    __slots__ = ("_count", "_common")

    def __init__(self, board: SharedStats, child: int):
        self._count = SharedCount([board.cells(other) for other in range(board.count)], child, TTFT_WAITING)
        self._common = board.common

    def _get_waiting(self) -> int:
        return self._count.value

    def _set_waiting(self, waiting: int) -> None:
        self._count.value = waiting

    def _get_pace(self) -> float:
        return self._common[PACE]

    def _set_pace(self, pace: float) -> None:
        self._common[PACE] = pace

    waiting = property(_get_waiting, _set_waiting)  # type: ignore[assignment]
    _pace = property(_get_pace, _set_pace)  # type: ignore[assignment]


class SharedAdmission(Admission):
    """One child's part. ``signals`` are the children's event descriptors: writing to one makes it look for a place."""

    def __init__(self, rules: AdmissionRules, loop: asyncio.AbstractEventLoop, board: SharedStats, child: int,
                 signals: Sequence[int]):
        self._board = board
        self._child = child
        self._running = SharedCount(_singles(board.running), child, 0)
        self._queued = SharedCount(_singles(board.queued), child, 0)
        super().__init__(rules, loop.time)
        self._loop = loop
        self._signals = signals
        self._cells = [board.cells(other) for other in range(board.count)]
        self._all_running, self._all_queued = board.running, board.queued
        self._safe = rules.max_concurrent - (board.count - 1)
        self._plain = not (rules.rate or rules.per_key or rules.slo_ttft)
        self._table = KeyTable(board, child, rules.rate_per_key)
        self.ttft = SharedEstimate(board, child)
        if rules.rate:
            with board.lock:
                self._bucket = SharedBucket(rules.rate, loop.time(), board.common, LEVEL)
        self._timer: asyncio.TimerHandle | None = None
        loop.add_reader(signals[child], self._signalled)

    def _get_running(self) -> int:
        return self._running.value

    def _set_running(self, running: int) -> None:
        self._running.value = running

    def _get_queued(self) -> int:
        return self._queued.value

    def _set_queued(self, queued: int) -> None:
        self._queued.value = queued

    running = property(_get_running, _set_running)  # type: ignore[assignment]
    queued = property(_get_queued, _set_queued)  # type: ignore[assignment]

    def close(self) -> None:
        self._loop.remove_reader(self._signals[self._child])
        if self._timer is not None:
            self._timer.cancel()

    def walk_in(self) -> Permit | None:
        if self._plain:
            running = self._all_running
            running[self._child] += 1
            if sum(running) <= self._safe and not sum(self._all_queued):
                return self._common
            running[self._child] -= 1
        return None

    def enter(self, key: bytes, streamed: bool, priority: Callable[[], int], start: Callable[[Permit], None],
              refuse: Callable[[ServingError], None]) -> Permit | Waiting:
        ticket = self.walk_in()
        if ticket is not None:
            return ticket
        with self._board.lock:
            found = super().enter(key, streamed, lambda: _bounded(priority()), start, refuse)
            if isinstance(found, Waiting):
                self._publish()
        if isinstance(found, Waiting):  # What seemed to hold the last place may just have been turned away itself.
            self._loop.call_soon(self._pass_on)
            self._look_again()
        return found

    def leave(self) -> None:
        self._all_running[self._child] -= 1
        if sum(self._all_queued):
            self._pass_on()

    # ------------------------------------------------------------------ inside

    def _full(self) -> bool:
        """Others that wait go first, even where a place is free this moment."""
        return super()._full() or (self.rules.max_concurrent > 0 and self.queued > 0)

    def _owner(self, key: bytes, now: float) -> _Key:
        owner = self._table.find(key, now)
        if owner is None:
            raise self._refusal("key", "Too many API keys have requests at once.", 1.0)
        return owner

    def _unqueue(self, waiting: Waiting) -> None:
        super()._unqueue(waiting)
        self._publish()

    def _publish(self) -> None:
        """Tell who is the first of this process to go."""
        while self._heap and not self._heap[0][2].queued:
            heapq.heappop(self._heap)
        if self._heap:
            minus_priority, _, waiting = self._heap[0]
            cells = self._cells[self._child]
            cells[HEAD_PRIORITY], cells[HEAD_SINCE] = minus_priority, int(waiting.since * 1e6)

    def _first(self) -> int:
        """The process whose first is the first of all; this one where nobody waits."""
        heads = [(cells[HEAD_PRIORITY], cells[HEAD_SINCE], child) for child, cells in enumerate(self._cells)
                 if self._all_queued[child]]
        return min(heads)[2] if heads else self._child

    def _pass_on(self) -> None:
        """Give free places to those that wait: here, or in the process that is signalled."""
        if self._starting:  # A request that fails at once ends within start(): the loop goes on.
            return
        self._starting = True
        try:
            while sum(self._all_queued):
                child = self._first()
                if child != self._child:
                    os.eventfd_write(self._signals[child], 1)
                    return
                waiting = self._take()
                if waiting is None:
                    return
                waiting.start(self._common or Permit(self, waiting.key, waiting.place, waiting.since))
        finally:
            self._starting = False

    def _take(self) -> Waiting | None:
        """Move the first that waits here to a free place, if there is one."""
        with self._board.lock:
            if not self._all_queued[self._child] or sum(self._all_running) >= self.rules.max_concurrent:
                return None
            waiting = heapq.heappop(self._heap)[2]
            self.running += 1
            self._unqueue(waiting)
            return waiting

    def _signalled(self) -> None:
        os.eventfd_read(self._signals[self._child])
        self._pass_on()

    def _look_again(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        self._pass_on()
        if self._all_queued[self._child]:
            self._look_again()


def _singles(words: memoryview) -> list[memoryview]:
    return [words[child:child + 1] for child in range(len(words))]


def _bounded(priority: int) -> int:
    return max(-_MOST_PRIORITY, min(priority, _MOST_PRIORITY))
