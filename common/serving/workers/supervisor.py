"""The main process's workers: started, kept running, kept up to date, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

from aiohttp import web

from ...api.link import Link
from ...api.messages import Abort, Generate
from ..host import EngineHost
from ..web import failures
from .broker import Broker
from .messages import (
    AbortGroup,
    CollectCounts,
    Cut,
    Drain,
    Listening,
    PrepareGrammar,
    ServerState,
    StartFailed,
    StateApplied,
    ToMain,
    WorkerCounts,
)
from .state import state_of
from .worker import WorkerSpec, run_worker

log = logging.getLogger("baton.server")

_STATE_PERIOD_SECONDS = 0.02
_APPLY_SECONDS = 2.0
"""Longest wait for workers to take in a state or to report counts: one may have been stopped by a debugger."""
_PAUSE_SECONDS = 1.0
"""Between two starts of a worker that does not live."""
_STABLE_SECONDS = 10.0
_KILL_AFTER_SECONDS = 2.0
"""After --shutdown-grace-secs, in which a worker tells its clients that they were cut."""


class _Process:
    """One worker's process, its link and its requests."""

    def __init__(self, host: EngineHost, spec: WorkerSpec, publish_state: Callable[[], object]):
        self._host = host
        self.spec = spec
        self.listening = False
        self.refusal: str | None = None
        self.applied_version = -1
        self.reported = 0
        """Number of the last request for counts that it answered."""
        self.broker = Broker(host.context, self.send, publish_state)
        self.changed = asyncio.Event()
        """Set at each of its messages, and at its end."""
        self._link: Link | None = None
        self._process: BaseProcess | None = None
        self._failures = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def run(self, state: Callable[[], ServerState]) -> int:
        """Runs the process, whose first message is the ``state`` by then; returns its exit code. Raises OSError."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = multiprocessing.get_context("spawn").Process(
                target=run_worker, args=(self.spec, theirs, os.getpid()), name=f"worker{self.spec.index}", daemon=False)
            try:
                process.start()
            except OSError:
                ours.close()
                raise
        self._process = process
        self._link = await Link.over(ours, ToMain, self._receive, lambda: None)
        self._link.send(state())
        await _ended(process)
        await self._link.ended()
        self.listening = False
        self.changed.set()
        return process.exitcode or 0

    def send(self, message: Any) -> None:
        if self._link is not None:
            self._link.send(message)

    def kill(self) -> None:
        if self._process is not None and self._process.is_alive():
            self._process.kill()

    def _receive(self, message: Any) -> None:
        match message:
            case Generate():
                self.broker.generate(message)
                return
            case Abort():
                self.broker.abort(message)
                return
            case PrepareGrammar():
                self.broker.prepare_grammar(message)
            case Listening():
                self.listening = True
            case StartFailed(sentence):
                self.refusal = sentence
            case StateApplied(version):
                self.applied_version = version
            case WorkerCounts(seq, counts, num_failures):
                self.reported = max(seq, self.reported)
                self._host.context.telemetry.metrics.others.update(self.spec.index, counts)
                failures.count += num_failures - self._failures
                self._failures = num_failures
        self.changed.set()


class Workers:
    """The workers of a server. Use as an asynchronous context manager around the life of the engine."""

    def __init__(self, host: EngineHost, count: int, port: int):
        self._host = host
        self._context = context = host.context
        self.address = f"{host.folder}/http"
        """Path of the Unix socket to which workers forward; the main process must listen there."""
        self._specs = [WorkerSpec(host.config, index, port, self.address, context.client.max_requests)
                       for index in range(1, count + 1)]
        self._processes: dict[int, _Process] = {}
        self._state = state_of(context, 0)
        self._counts = itertools.count(1)
        self._stopping = asyncio.Event()
        context.status.workers_ready = False
        context.telemetry.collect_others = self.collect_counts
        context.client.on_abort = lambda rid: self._send(AbortGroup(rid))

    async def __aenter__(self) -> Workers:
        self._tasks = [asyncio.create_task(self._keep_running(spec)) for spec in self._specs]
        self._publisher = asyncio.create_task(self._publish())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        self._stopping.set()
        for process in self._processes.values():
            process.kill()
        await asyncio.wait(self._tasks)
        self._publisher.cancel()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Ends the workers in order; returns when all have ended. ``hurry`` ends the wait for running requests."""
        self._stopping.set()
        self._send(Drain())
        seconds = self._host.config.http.shutdown_grace_secs + _KILL_AFTER_SECONDS
        ended = asyncio.ensure_future(asyncio.wait(self._tasks, timeout=seconds))
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait((ended, hurried), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            self._send(Cut())
            await asyncio.wait((ended,), timeout=_KILL_AFTER_SECONDS)
        hurried.cancel()
        ended.cancel()

    # ------------------------------------------------------------------ state and counts

    async def before_answer(self, request: web.Request, response: web.StreamResponse) -> None:
        """Sends workers what the request changed; returns when they have it. A signal handler of
        ``on_response_prepare``."""
        if self._publish_changes():
            version = self._state.version
            await self._until(lambda process: process.applied_version >= version)

    async def collect_counts(self) -> None:
        """Brings the counts of the workers up to date."""
        number = next(self._counts)
        self._send(CollectCounts(number))
        await self._until(lambda process: process.reported >= number)

    async def _publish(self) -> None:
        """Sends workers what changed by itself: the progress of starting, or the engine's end."""
        while True:
            self._publish_changes()
            await asyncio.sleep(_STATE_PERIOD_SECONDS)

    def _publish_changes(self) -> bool:
        """Sends the state if it changed; returns whether it did."""
        state = state_of(self._context, self._state.version)
        if state == self._state:
            return False
        state.version += 1
        self._state = state
        self._send(state)
        return True

    async def _until(self, reached: Any) -> None:
        """Waits until all workers that serve have ``reached`` something, for _APPLY_SECONDS at most."""
        end = time.monotonic() + _APPLY_SECONDS
        for process in list(self._processes.values()):
            while process.listening and not reached(process) and (left := end - time.monotonic()) > 0:
                process.changed.clear()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(process.changed.wait(), left)

    def _send(self, message: Any) -> None:
        for process in self._processes.values():
            process.send(message)

    # ------------------------------------------------------------------ processes

    async def _keep_running(self, spec: WorkerSpec) -> None:
        """Runs a worker, and another one when it ends, until the server stops."""
        while not self._stopping.is_set():
            began = time.monotonic()
            process = self._processes[spec.index] = _Process(self._host, spec, self._publish_changes)
            watching = asyncio.create_task(self._watch_start(process))
            try:
                code = await process.run(lambda: self._state)
            except OSError as error:  # no more processes or descriptors may be had
                self._host.finish(f"Worker {spec.index} (--tokenizer-worker-num) cannot start: {error.strerror}.")
                return
            finally:
                watching.cancel()
                num_requests = process.broker.close()
                self._context.telemetry.metrics.others.end(spec.index)
            if self._stopping.is_set() or self._ends_start(process, code):
                return
            log.error("worker %d (pid %s) %s with %d requests; another one starts", spec.index, process.pid,
                      _how_ended(code), num_requests)
            if time.monotonic() - began < _STABLE_SECONDS:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), _PAUSE_SECONDS)

    async def _watch_start(self, process: _Process) -> None:
        """Notes that the first of all workers listen."""
        while not process.listening:
            process.changed.clear()
            await process.changed.wait()
        if all(index in self._processes and self._processes[index].listening
               for index in range(1, len(self._specs) + 1)):
            self._context.status.workers_ready = True
            self._host.check_ready()

    def _ends_start(self, process: _Process, code: int) -> bool:
        """True where a worker could not start, and the server cannot therefore."""
        if process.refusal is None and self._context.status.workers_ready:
            return False
        self._host.finish(process.refusal or f"Worker {process.spec.index} (--tokenizer-worker-num) "
                          f"{_how_ended(code)} while it started.")
        return True


async def _ended(process: BaseProcess) -> None:
    """Returns when the process has ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process.sentinel, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(process.sentinel)
    process.join()


def _how_ended(code: int) -> str:
    """The log's words for an exit code."""
    return f"was ended by {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"ended with code {code}"
