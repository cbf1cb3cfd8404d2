"""What the host does in a step of an engine, by part: clocks around the functions that a step is made of."""

from __future__ import annotations

import resource
import statistics
import time
from collections import defaultdict
from typing import Any

import torch
from torch.profiler import record_function

from ...common.engine.rank import EngineParts
from ...common.engine.unified_scheduler import UnifiedScheduler
from ...common.kvcache.page_columns import PageColumns
from ...common.runner.cuda_graphs.decode_graphs import DecodeGraphs
from ...common.runner.cuda_graphs.decode_inputs import DecodeInputs
from ...common.sampling.sampled_tokens import SampledTokenBuffers, SampledTokens


class Parts:
    """Own seconds of named parts of a step, gathered by wrapping the functions that they are made of."""

    def __init__(self) -> None:
        self.on = False
        self.marks = False
        self.steps: list[dict[str, float]] = []
        self.usages: list[dict[str, float]] = []
        self._now: dict[str, float] = defaultdict(float)
        self._open: list[str] = ["loop"]
        self._since = 0.0
        self._used = _used()

    def wrap(self, owner: Any, name: str, part: str) -> None:
        inner = getattr(owner, name, None)
        if inner is None:
            return

        def timed(*args: Any, **options: Any) -> Any:
            if self.marks:
                with record_function(f"# {part}"):
                    return inner(*args, **options)
            if not self.on:
                return inner(*args, **options)
            self._switch(part)
            try:
                return inner(*args, **options)
            finally:
                self._switch(None)

        setattr(owner, name, timed)

    def begin(self) -> None:
        self._now.clear()
        self._used = _used()
        self._since = time.perf_counter()

    def end(self) -> None:
        """What the thread used of the processor, and pages that it touched first, tell a step that computed long from
        one that was held up."""
        self._charge()
        self.steps.append(dict(self._now))
        self.usages.append({name: now - before for (name, now), before in zip(_used().items(), self._used.values())})

    def start(self) -> None:
        """Forget the steps that there were; it is on until somebody says otherwise."""
        self.steps, self.usages, self.on = [], [], True

    def _charge(self) -> None:
        now = time.perf_counter()
        self._now[self._open[-1]] += now - self._since
        self._since = now

    def _switch(self, part: str | None) -> None:
        self._charge()
        if part is None:
            self._open.pop()
        else:
            self._open.append(part)

    def table(self) -> dict[str, float]:
        """Medians in microseconds, and ``host``: of all but the waiting."""
        names = {name for step in self.steps for name in step}
        found = {name: 1e6 * statistics.median(step.get(name, 0.0) for step in self.steps) for name in names}
        host = [1e6 * sum(took for name, took in step.items() if name != "wait") for step in self.steps]
        return dict(sorted(found.items(), key=lambda item: -item[1])) | {
            "host": statistics.median(host), "host mean": statistics.mean(host)}


def _used() -> dict[str, float]:
    found = resource.getrusage(resource.RUSAGE_THREAD)
    return {"user": found.ru_utime, "system": found.ru_stime, "faults": found.ru_minflt, "preempted": found.ru_nivcsw}


PARTS = Parts()


def watch(scheduler: UnifiedScheduler, parts: EngineParts) -> None:
    """An engine's own functions; ``watch_classes`` has the others."""
    executor, runner = parts.executor, parts.runner
    PARTS.wrap(scheduler, "_next_batch", "schedule")
    PARTS.wrap(executor, "launch", "launch, rest")
    PARTS.wrap(executor, "_model_input", "inputs")
    PARTS.wrap(runner, "forward", "forward, rest")
    PARTS.wrap(runner, "step", "forward, rest")
    PARTS.wrap(runner._attention, "plan", "plan")
    for step in () if runner._decode_graphs is None else runner._decode_graphs._steps.values():
        PARTS.wrap(step.attention, "refresh", "plan")
    PARTS.wrap(runner._model, "forward", "model")
    PARTS.wrap(executor._sampler, "launch", "sample")
    PARTS.wrap(scheduler.batcher, "mark_launched", "launched")
    PARTS.wrap(scheduler._pipeline, "_process_output", "take in")
    PARTS.wrap(parts.tracker, "flush", "emit")


def watch_classes() -> None:
    PARTS.wrap(SampledTokens, "token_ids", "wait")
    PARTS.wrap(SampledTokenBuffers, "copy", "results to host")
    PARTS.wrap(PageColumns, "slots", "page table")
    PARTS.wrap(DecodeInputs, "fill", "graph inputs")
    PARTS.wrap(DecodeGraphs, "decode", "graph, rest")
    PARTS.wrap(torch.cuda.CUDAGraph, "replay", "replay")
