"""The loop of an engine rank: drain the inbox, let the scheduler step, flush the outbox."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

from ..api import messages
from ..api.errors import Aborted, AbortRequested, DeadlineExceeded, ServingError
from ..api.messages import (
    RANK_TOTALS,
    Abort,
    Done,
    FromEngine,
    Generate,
    GetState,
    RankTotals,
    Shutdown,
    State,
    ToEngine,
)
from ..grammar.store import GrammarStore
from ..kvcache.manager import KVCacheManager
from ..request.req import Req
from ..runner.dp_sync import DPSync
from ..scheduler.request_tracker import RequestTracker
from .control import Control
from .kv_event_publisher import KVEventPublisher
from .peers import Peers
from .rank_channel import PPTicker, Ticker
from .watchdog import Watchdog

log = logging.getLogger("baton.engine")

IDLE_WAIT_MS = 1000
TRANSFER_WAIT_MS = 1
DEADLINE_CHECK_SECONDS = 0.1


class Scheduler(Protocol):
    """Interface of a role's scheduler to the loop."""

    @property
    def peers(self) -> Peers: ...

    @property
    def idle(self) -> bool:
        """True while no request runs, waits or is being transferred, and no page is allocated."""

    @property
    def paused(self) -> bool:
        """True while no step is launched."""

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_transferring(self) -> int: ...

    @property
    def counters(self) -> dict[str, float]: ...

    @property
    def gauges(self) -> dict[str, float]:
        """Lengths of the role's own queues."""

    def add(self, req: Req) -> None:
        """Accept a request; a ServingError refuses it."""

    def synchronize(self) -> None:
        """Wait for the step in flight and process its results; requests may end by it."""

    def abort(self, req: Req, error: ServingError) -> None:
        """Remove a request that the tracker closes; ``error`` is sent to a peer.

        ``synchronize`` must have been called since the last step.
        """

    def step(self, now: float) -> bool:
        """Poll transfers and run one batch; False where no batch could be run."""

    def close(self) -> None: ...


class EngineLoop:
    """One rank's main loop over a scheduler. All ranks of a group run it in lockstep."""

    def __init__(self, ticker: Ticker | PPTicker, tracker: RequestTracker, scheduler: Scheduler, cache: KVCacheManager,
                 control: Control, send: Callable[[FromEngine], None], events: KVEventPublisher | None = None,
                 watchdog: Watchdog | None = None, grammars: GrammarStore | None = None,
                 dp_sync: DPSync | None = None, send_totals: Callable[[RankTotals], None] | None = None):
        """``grammars``: on the rank that samples tokens. ``dp_sync``: with other data-parallel ranks, which
        get the same ticks and filter their own requests. ``send_totals``: on ranks other than the first of their
        group, which report RANK_TOTALS alone."""
        self._ticker = ticker
        self._tracker = tracker
        self._scheduler = scheduler
        self._peers = scheduler.peers
        self._cache = cache
        self._control = control
        self._send = send
        self._events = events
        self._watchdog = watchdog
        self._grammars = grammars
        self._dp_sync = dp_sync
        self._send_totals = send_totals
        self._dp_rank = 0 if dp_sync is None else dp_sync.dp_rank
        self._next_deadline_check = 0.0
        self._stopping = False

    def run(self) -> None:
        """Run until the API server sends Shutdown."""
        busy = False
        while not self._stopping:
            tick = self._ticker.next(self._wait_ms(busy))
            for done in self._grammars.finished() if self._grammars else ():
                self._send(done)
            if self._peers.busy:
                for done in self._peers.take_results():
                    self._send(done)
            if self._control.busy:
                for done in self._control.finished():
                    self._send(done)
            if self._watchdog is not None:
                self._watchdog.beat()
            for message in tick.messages:
                self._handle(message, tick.now)
            self._end_overdue(tick.now)
            was_idle = self._scheduler.idle
            if self._dp_sync is not None:
                self._dp_sync.propose_wait(self._poll_timeout_ms())
            busy = self._scheduler.step(tick.now)
            if busy:
                self._control.profiler.step()
            self._tracker.flush()
            if busy and self._control.step_delay:
                time.sleep(self._control.step_delay)
            if self._events is not None:
                self._events.flush(tick.now)
            if not was_idle and self._scheduler.idle:
                self._cache.check_integrity()
                self._cache.tidy()
        self._control.close()
        self._scheduler.close()

    def _wait_ms(self, busy: bool) -> int:
        if self._dp_sync is not None:
            return self._dp_sync.wait_ms
        return 0 if busy else self._poll_timeout_ms()

    def _poll_timeout_ms(self) -> int:
        waits = (self._peers.busy or self._control.busy or (self._grammars is not None and self._grammars.busy)
                 or (self._cache.tier is not None and self._cache.tier.busy))
        return IDLE_WAIT_MS if self._scheduler.idle and not waits else TRANSFER_WAIT_MS

    def _handle(self, message: ToEngine, now: float) -> None:
        match message:
            case Generate():
                if message.dp_rank in (None, self._dp_rank):
                    self._start(message, now)
            case Abort():
                self._abort(message)
            case messages.Control():
                self._execute(message)
            case messages.ConnectPeer():
                self._connect(message)
            case messages.PrepareGrammar():
                if self._grammars is not None:
                    self._grammars.prepare(message)
            case messages.DropGrammar():
                if self._grammars is not None:
                    self._grammars.drop(message.spec)
            case GetState():
                self._send_state(message.seq)
            case Shutdown():
                self._stopping = True

    def _start(self, message: Generate, now: float) -> None:
        req = self._tracker.accept(message, now)
        if req is None:
            return
        if req.sampling.grammar is not None and self._grammars is not None:
            req.matcher = self._grammars.matcher(req, req.num_prompt_tokens - message.num_answered)
        try:
            self._control.check_serving()
            self._scheduler.add(req)
        except ServingError as error:
            self._tracker.fail(req, error)

    def _abort(self, message: Abort) -> None:
        if message.rid and message.rid not in self._tracker.live:
            return
        self._scheduler.synchronize()
        live = self._tracker.live
        reqs = list(live.values()) if message.rid == "" else [live[message.rid]] if message.rid in live else []
        for req in reqs:
            error = (Aborted if message.silent else AbortRequested)("The request was aborted.")
            self._scheduler.abort(req, error)
            if message.silent:
                self._tracker.drop(req)
            else:
                self._tracker.fail(req, error)

    def _end_overdue(self, now: float) -> None:
        if now < self._next_deadline_check:
            return
        self._next_deadline_check = now + DEADLINE_CHECK_SECONDS
        if not any(req.deadline <= now for req in self._tracker.live.values()):
            return
        self._scheduler.synchronize()
        for req in [req for req in self._tracker.live.values() if req.deadline <= now]:
            error = DeadlineExceeded(f"The request did not end within {req.deadline - req.arrived:g} s.")
            self._scheduler.abort(req, error)
            self._tracker.fail(req, error)

    def _execute(self, message: messages.Control) -> None:
        try:
            command = self._control.command(message.name)
            if command.synchronizes:
                self._scheduler.synchronize()
            with self._watchdog.suspended() if self._watchdog else nullcontext():  # a checkpoint may load for minutes
                done = self._control.execute(command.decode(message.arguments), idle=self._no_pages_in_use,
                                             still=self._scheduler.paused and not self._scheduler.num_transferring)
            if isinstance(done, str):
                self._send(Done(message.seq, done))
            else:
                self._control.finish_later(message.seq, done)
        except ServingError as error:
            self._send(Done(message.seq, error.message, error.code))

    def _connect(self, message: messages.ConnectPeer) -> None:
        try:
            self._peers.connect(message)
        except ServingError as error:
            self._send(Done(message.seq, error.message, error.wire_code))

    @property
    def _no_pages_in_use(self) -> bool:
        """True while no request runs or has pages; requests may wait, as after a retraction for a pause."""
        scheduler = self._scheduler
        return scheduler.idle or (scheduler.paused and not self._cache.num_allocated and not scheduler.num_transferring)

    def _send_state(self, seq: int) -> None:
        if self._send_totals is None:
            self._send(self._state(seq))
            return
        values = {**self._scheduler.counters, **self._scheduler.gauges}
        totals = {name: value for name, value in values.items() if name in RANK_TOTALS}
        self._send_totals(RankTotals(seq, self._dp_rank, totals))

    def _state(self, seq: int) -> State:
        cache, scheduler = self._cache, self._scheduler
        return State(
            seq=seq, total_pages=cache.num_pages, free_pages=cache.num_free, held_pages=cache.num_allocated,
            cached_pages=cache.num_cached, page_size=cache.page_size, num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting, num_transferring=scheduler.num_transferring,
            counters={**self._tracker.counters, **scheduler.counters},
            gauges={"token_usage": 1 - cache.num_available / cache.num_pages, **cache.group_gauges, **scheduler.gauges,
                    **self._control.gauges},
            dp_rank=self._dp_rank, model=self._control.model, pair_key=self._peers.key,
        )
