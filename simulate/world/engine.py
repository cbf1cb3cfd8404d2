"""An engine on the virtual clock: the loop of a rank, over the real scheduler of its role.

An iteration takes what has arrived, lets the scheduler step, and ends when the step before has its results: then the
next one begins. Where nothing but decode steps of one batch would follow, many of them are *skipped*: their ends are
known in closed form, and the batch's state is set to that after them. An arrival ends the skip at the next iteration,
so a simulation with skips equals one without (tests/simulate/test_engine.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from ...common.api.errors import ServingError
from ...common.api.messages import Failed, FromEngine, OutputBatch
from ...common.request.req import Req
from ...common.scheduler.request_tracker import RequestTracker
from .batcher import VirtualBatcher, pages_needed
from .device import VirtualDevice, VirtualStep
from .events import Events

POLL_SECONDS = 1e-3
"""An idle engine with open transfers looks at them this often, see common/engine/loop.py."""
MIN_SKIPPED_STEPS = 4
"""Fewer steps cost less than what skipping them takes."""


class RoleScheduler(Protocol):
    """The part of a role's scheduler that the loop uses."""

    @property
    def idle(self) -> bool: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def add(self, req: Req) -> None: ...

    def step(self, now: float) -> bool: ...


class Outputs(Protocol):
    """Receives what the engine sends to its API server, with the time of sending."""

    def tokens(self, rids: list[str], ended: list[str], time: float) -> None:
        """A token of each request; those in ``ended`` end with it."""

    def failed(self, rid: str, message: str, time: float) -> None: ...

    def skipped(self, rids: list[str], steps: int, end_of: Callable[[int], float]) -> None:
        """``steps`` tokens of each request, token i at time ``end_of(i)``; none ends."""


@dataclass
class Skip:
    """Up to ``steps`` iterations that each launch a decode step and take in the one before, first ``launched``, which
    ends at time ``begin``. The step launched first takes ``first`` seconds, each further one ``growth`` more, because
    contexts grow. The iterations begin at ``start``, ``end_of(0)``, ``end_of(1)`` and so on."""

    steps: int
    start: float
    begin: float
    first: float
    growth: float
    launched: VirtualStep

    def end_of(self, step: int) -> float:
        """The end of the step that was in flight (0), or of a later one."""
        return self.begin + step * self.first + self.growth * step * (step - 1) / 2

    def iterations_before(self, time: float) -> int:
        """Number of iterations that begin before ``time``: the next one is the first to notice what happens then."""
        if time <= self.start:
            return 0
        if time <= self.begin:
            return 1
        a, b = self.growth / 2, self.first - self.growth / 2
        rest = time - self.begin
        guess = rest / b if a == 0 else (math.sqrt(b * b + 4 * a * rest) - b) / (2 * a)
        step = max(0, int(guess) - 1)
        while self.end_of(step) < time:
            step += 1
        return step + 1


@dataclass
class Engine:
    """``unified`` has the pipeline whose decode steps may be skipped; None on a prefill server."""

    name: str
    events: Events
    device: VirtualDevice
    batcher: VirtualBatcher
    tracker: RequestTracker
    scheduler: RoleScheduler
    outputs: Outputs
    may_skip: Callable[[], VirtualStep | None] = lambda: None
    _inbox: list[Req] = field(default_factory=list)
    _next: float = math.inf  # time of the next iteration
    _turn: int = 0  # only the event of the last one that was scheduled counts
    _skip: Skip | None = None
    num_iterations: int = 0
    num_skipped: int = 0

    def arrive(self, req: Req) -> None:
        """A request comes from the API server, now."""
        self._inbox.append(req)
        self._wake(0.0)

    def notify(self) -> None:
        """A transfer of this engine has changed its state, now."""
        self._wake(POLL_SECONDS)

    def skipped_output(self, time: float) -> tuple[float, int] | None:
        """The time of the last output before ``time`` and its rows, where it is of a step that is being skipped."""
        if self._skip is None or (before := self._skip.iterations_before(time)) < 2:
            return None
        return self._skip.end_of(before - 2), len(self._skip.launched.step.reqs)

    def _wake(self, poll: float) -> None:
        now = self.events.now
        if self._skip is not None:
            self._end_skip(self._skip.iterations_before(now))
            self._schedule(self.device.now)
        elif self._next == math.inf:
            begin = self.device.now
            if poll and now > begin:
                now = begin + math.ceil((now - begin) / poll) * poll
            self._schedule(max(now, begin))

    def _schedule(self, time: float) -> None:
        self._next = time
        self._turn += 1
        self.events.at(time, self._iterate, self._turn)

    def _iterate(self, turn: int) -> None:
        if turn != self._turn:
            return
        if self._skip is not None:
            self._end_skip(self._skip.steps)
        self.num_iterations += 1
        device = self.device
        device.now = max(device.now, self.events.now)
        if self._inbox:
            self._take_in()
        busy = self.scheduler.step(device.now)
        self.tracker.flush()
        self._next = math.inf
        if not busy:
            return
        launched = self.may_skip()
        if launched is None or not self._begin_skip(launched):
            self._schedule(device.now)

    def _take_in(self) -> None:
        inbox, self._inbox = self._inbox, []
        for req in inbox:
            self.tracker.live[req.rid] = req
            try:
                self.scheduler.add(req)
            except ServingError as error:
                self.tracker.fail(req, error)

    # -- decode steps that are skipped ---------------------------------------------------------------------------------

    def _begin_skip(self, launched: VirtualStep) -> bool:
        """Skip the steps after ``launched`` up to the one before a request's last; False where they are too few."""
        batcher, device = self.batcher, self.device
        batch = batcher.steady_batch(launched.step)
        host = device.costs.host_decode / 1e3
        if batch is None or batch.min_remaining - 1 < MIN_SKIPPED_STEPS or device.now + host > launched.end:
            return False
        steps = batch.min_remaining - 1  # the last step of a request is none of them
        if pages_needed(batch, steps, batcher.cache.page_size) > batcher.cache.num_available:
            return False
        rows, costs = len(batch), device.costs
        first = costs.decode(rows, int(batch.positions.sum()) + rows) / 1e3
        if first < host:
            return False
        self._skip = Skip(steps, device.now, launched.end, first, rows * costs.decode_context / 1e3, launched)
        self._schedule(self._skip.end_of(steps - 1))
        return True

    def _end_skip(self, steps: int) -> None:
        """Let ``steps`` of the iterations have run: as many tokens of each request are reported."""
        skip, self._skip = self._skip, None
        assert skip is not None
        batch = skip.launched.step.input_batch
        assert batch is not None and steps <= skip.steps
        if not steps:
            return
        device, usage = self.device, self.device.usage
        self.batcher.skip(batch, steps)
        self.tracker.counters["generation_tokens"] += steps * len(batch)
        self.outputs.skipped(batch.rids, steps, skip.end_of)
        device.now, device.free = skip.end_of(steps - 1), skip.end_of(steps)
        skip.launched.end = device.free
        usage.decode += device.free - skip.begin
        usage.num_decode += steps
        usage.rows += steps * len(batch)
        self.num_skipped += steps


def decode_outputs(message: FromEngine, outputs: Outputs, now: float) -> None:
    """Pass a message of the tracker on."""
    if isinstance(message, OutputBatch):
        rids = message.rids
        outputs.tokens(rids, [rids[row] for row, extras in message.extras.items() if extras.finish is not None], now)
    else:
        assert isinstance(message, Failed)
        outputs.failed(message.rid, message.message, now)
