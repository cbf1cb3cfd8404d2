"""What a server notes of each step and of each message to its front, where ``STEP_TRACE`` names a folder for it.

Times are ``time.perf_counter``'s in seconds, which the processes of a machine share.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "STEP_TRACE"
LEAST_COLLECTION = 2e-4


def folder() -> Path | None:
    named = os.environ.get(FOLDER)
    return Path(named) if named else None


def note_collections() -> list[tuple[float, float, int]]:
    """This process's garbage collections from now on: when they began, seconds, and the generation."""
    found: list[tuple[float, float, int]] = []
    began = 0.0

    def noted(phase: str, about: dict[str, int]) -> None:
        nonlocal began
        if phase == "start":
            began = time.perf_counter()
        elif (took := time.perf_counter() - began) > LEAST_COLLECTION:
            found.append((began, took, about["generation"]))

    gc.callbacks.append(noted)
    return found


class EngineTrace:
    """A rank's: ``steps`` that were launched, with the host's parts of the turn that did, and what was ``told``: when,
    of how many requests, and of which step."""

    def __init__(self, into: Path, parts: Any = None):
        """``parts``: a ``host_parts.Parts`` that watches the scheduler, where there is one."""
        self._into = into
        self._parts = parts
        self._collections = note_collections()
        self._events: list[tuple[Any, Any]] = []
        self._waited = -1
        self.steps: list[dict[str, Any]] = []
        self.told: list[tuple[float, int, int]] = []

    def executor(self, executor: Any) -> Any:
        return _TracedExecutor(executor, self)

    def watch(self, scheduler: Any, tracker: Any) -> None:
        """Scheduler and tracker are told of by their own functions, which are wrapped; the file is written when the
        scheduler is closed."""
        step, close, send = scheduler.step, scheduler.close, tracker._send

        def turn(now: float) -> bool:
            before = len(self.steps)
            if self._parts is not None:
                self._parts.start()
                self._parts.begin()
            busy: bool = step(now)
            if self._parts is not None:
                self._parts.end()
                self._parts.on = False
                if len(self.steps) > before:
                    self.steps[-1]["host"] = {name: 1e3 * took for name, took in self._parts.steps[0].items()}
                    self.steps[-1]["used"] = self._parts.usages[0]
            return busy

        def sent(message: Any) -> None:
            send(message)
            if hasattr(message, "rids"):
                self.told.append((time.perf_counter(), len(message.rids), self._waited))

        def closed() -> None:
            self._write()
            close()

        scheduler.step, scheduler.close, tracker._send = turn, closed, sent

    def launch(self, inner: Callable[..., Any], batch: Any, after_group: Any) -> Any:
        import torch

        events = None
        if torch.cuda.is_available():
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events[0].record()
            self._events.append(events)
        number = len(self.steps)
        note = {"at": time.perf_counter(), "decode": not batch.num_prefill, "rows": len(batch)}
        self.steps.append(note)
        step = inner(batch, after_group)
        if events is not None:
            events[1].record()
        note["launched"] = time.perf_counter()
        name = "result" if hasattr(step, "result") else "sample"  # a chain step's has drafts, too
        return dataclasses.replace(step, **{name: _TracedTokens(getattr(step, name), self, number)})

    def waited(self, number: int, since: float) -> None:
        if self._waited != number:
            self._waited = number
            self.steps[number] |= {"waited": since, "ready": time.perf_counter()}

    def _write(self) -> None:
        """With events, each step gets the milliseconds that it took the GPU, and how long that had nothing to do
        before."""
        if self._events:
            import torch

            torch.cuda.synchronize()
            ended = None
            for note, (begin, end) in zip(self.steps, self._events):
                note["gpu"] = begin.elapsed_time(end)
                note["idle"] = 0.0 if ended is None else max(0.0, ended.elapsed_time(begin))
                ended = end
        (self._into / "engine.json").write_text(json.dumps(
            {"steps": self.steps, "told": self.told, "collections": self._collections}))


class _TracedExecutor:
    def __init__(self, executor: Any, trace: EngineTrace):
        self._executor = executor
        self._trace = trace

    def launch(self, batch: Any, after_group: Any = None) -> Any:
        return self._trace.launch(self._executor.launch, batch, after_group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class _TracedTokens:
    def __init__(self, sampled: Any, trace: EngineTrace, number: int):
        self._sampled = sampled
        self._trace = trace
        self._number = number

    def token_ids(self) -> Any:
        since = time.perf_counter()
        found = self._sampled.token_ids()
        self._trace.waited(self._number, since)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampled, name)


class FrontTrace:
    """A front's: of each message of outputs when it ``came``, and of what streams wrote before the next one the number,
    the sum of the times, and the last."""

    def __init__(self) -> None:
        self._collections = note_collections()
        self.came: list[list[float]] = []

    def watch(self) -> None:
        """From now on, in this process."""
        from aiohttp import web

        from ...common.api.messages import OutputBatch
        from ...common.engine_client.client import EngineClient

        dispatch, write, came = EngineClient.dispatch, web.StreamResponse.write, self.came

        def noted(client: Any, message: Any) -> None:
            if isinstance(message, OutputBatch):
                came.append([time.perf_counter(), 0, 0.0, 0.0])
            dispatch(client, message)

        def written(response: Any, data: Any) -> Any:
            if came:
                now = time.perf_counter()
                note = came[-1]
                note[1] += 1
                note[2] += now
                note[3] = now
            return write(response, data)

        EngineClient.dispatch = noted  # type: ignore[method-assign]
        web.StreamResponse.write = written  # type: ignore[method-assign,assignment]

    def save(self, into: Path) -> None:
        (into / "front.json").write_text(json.dumps({"came": self.came, "collections": self._collections}))
