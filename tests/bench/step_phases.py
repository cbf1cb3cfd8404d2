"""The device's time of decode steps by phase: the model, sampling, drafting, and nothing; and by kernel."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...common.bench.step_parts import advances, of_kernel, recorder
from .many_gpus_profile import Kernel, kernels_of, longest

MODEL, SAMPLE, DRAFT, BETWEEN = "model", "sample", "draft", "between"
Mark = Callable[[str], None]

_MARKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    MODEL: torch.tan, SAMPLE: torch.sinh, DRAFT: torch.cosh, BETWEEN: torch.frac}
"""Kernels that no model has, by which a profile shows where phases begin."""
_MARKER_NAMES = {"tan": MODEL, "sinh": SAMPLE, "cosh": DRAFT, "frac": BETWEEN}
_MARKER = re.compile(r"::(tan|sinh|cosh|frac)_kernel_cuda")


@contextlib.contextmanager
def watching(parts: Any, mark: Mark) -> Iterator[None]:
    """Calls ``mark`` where a phase begins in the steps that run while it is open, by calls of the parts of an engine
    (EngineParts). ``between`` begins where all of a step is launched."""
    runner, executor = parts.runner, parts.executor
    watched = [(runner, "step", MODEL, SAMPLE), (executor, "launch", None, BETWEEN)]
    if runner.drafter is not None:
        watched += [(runner.drafter, "run", DRAFT, BETWEEN), (runner, "verify_chains", MODEL, SAMPLE),
                    (runner, "draft_chains", DRAFT, BETWEEN)]
    with contextlib.ExitStack() as stack:
        for owner, name, before, after in watched:
            stack.enter_context(_marking(owner, name, before, after, mark))
        yield


@contextlib.contextmanager
def _marking(owner: Any, name: str, before: str | None, after: str, mark: Mark) -> Iterator[None]:
    function = getattr(owner, name)

    def marked(*args: Any, **options: Any) -> Any:
        if before is not None:
            mark(before)
        found = function(*args, **options)
        mark(after)
        return found

    setattr(owner, name, marked)
    try:
        yield
    finally:
        delattr(owner, name)


class Phases:
    """Notes when phases begin on the device. Each ends where the next begins, so that they add up to the whole time."""

    def __init__(self, on_gpu: bool):
        self._on_gpu = on_gpu
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """A phase begins here."""
        if not self._on_gpu:
            self._marks.append((phase, time.perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))

    def milliseconds(self) -> dict[str, float]:
        """A step's milliseconds by phase; the device has been waited for."""
        spent: Counter[str] = Counter()
        for (phase, begin), (_, end) in zip(self._marks, self._marks[1:]):
            spent[phase] += begin.elapsed_time(end) if self._on_gpu else 1e3 * (end - begin)
        steps = max(1, sum(phase == MODEL for phase, _ in self._marks[:-1]))
        return {phase: took / steps for phase, took in spent.items()}


def phase_times(engine: Any, steps: int) -> dict[str, float]:
    """Milliseconds by phase of ``steps`` steps of an engine."""
    phases = Phases(engine.runner.device.type == "cuda")
    with watching(engine.parts, phases.mark):
        for _ in range(steps):
            engine.step()
        engine.synchronize()
    return phases.milliseconds()


def kernel_times(engine: Any, steps: int, most: int = 10) -> dict[str, Any]:
    """Profiles ``steps`` steps of an engine; returns a step's milliseconds from the first kernel to the last, and of
    each phase those in which kernels ran, by part, and the longest kernels with calls and milliseconds. Empty on a
    CPU."""
    if engine.runner.device.type != "cuda":
        return {}
    anything = torch.zeros(1, device=engine.runner.device)

    def mark(phase: str) -> None:
        _MARKERS[phase](anything)

    with watching(engine.parts, mark), recorder(engine.runner.device) as profile:
        for _ in range(steps):
            engine.step()
        engine.synchronize()
    kernels = kernels_of(profile)
    span = (max(kernel[1] for kernel in kernels) - kernels[0][0]) / steps / 1e3
    return {"span_ms": span, "phases": {phase: _of_phase(own, steps, most) for phase, own in by_phase(kernels).items()}}


def by_phase(kernels: list[Kernel]) -> dict[str, list[Kernel]]:
    """Kernels, in the order of their start, by the marker before them."""
    found: dict[str, list[Kernel]] = {}
    phase = BETWEEN
    for kernel in kernels:
        if marker := _MARKER.search(kernel[2]):
            phase = _MARKER_NAMES[marker[1]]
        else:
            found.setdefault(phase, []).append(kernel)
    return found


def _of_phase(kernels: list[Kernel], steps: int, most: int) -> dict[str, Any]:
    parts: Counter[str] = Counter()
    for name, micros in advances(kernels):
        parts[of_kernel(name)] += micros / steps / 1e3
    return {"busy_ms": sum(parts.values()), "parts_ms": dict(parts), "launches": len(kernels) / steps,
            "longest": [(name, calls / steps, took / steps) for name, calls, took in longest(kernels, most)]}
