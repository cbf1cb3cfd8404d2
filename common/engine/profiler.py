"""torch.profiler around an engine's steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from ..api.errors import Conflict, InvalidRequest
from ..commands.profile import Stage, StartProfile

if TYPE_CHECKING:
    from torch.profiler import profile


class StepSource(Protocol):
    """A runner of steps: ``before_step`` is called with each one's number of requests in prefill."""

    before_step: Callable[[int], None] | None


class Profiler:
    """Profiler of one rank. ``step`` must be called after every step."""

    def __init__(self, rank: int, device: torch.device, runner: StepSource):
        self._rank = rank
        self._device = device
        self._runner = runner
        self._num_steps = 0  # since the engine's start
        self._command: StartProfile | None = None
        self._name = ""
        self._profile: profile | None = None
        self._target = Path()
        self._written: list[Path] = []
        self._steps_left: int | None = None
        self._stages_left: dict[Stage, int] = {}
        self._recorded: Stage | None = None
        self._step_stage: Stage | None = None

    @property
    def active(self) -> bool:
        """True from ``start`` on, also while its first step has not come."""
        return self._command is not None

    def start(self, command: StartProfile) -> str:
        """Raises Conflict while a profile runs, InvalidRequest for a folder that cannot be written and for what this
        device does not record."""
        if self._command is not None:
            raise Conflict("A profile is running; stop it first.")
        self._check(command)
        folder = Path(command.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"Cannot make the folder {folder}: {error.strerror}.", param="output_dir") from None
        # Servers that share a folder may start in the same second.
        tag = command.profile_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._name = f"{command.prefix or 'baton'}-{tag}-rank{self._rank}"
        self._command, self._written = command, []
        if command.by_stage:
            count = command.num_steps or 1
            self._stages_left = {"prefill": count, "decode": count}
            self._runner.before_step = self._before_step
            return f"The profiles go to {self._path('prefill')} and {self._path('decode')}."
        self._steps_left = command.num_steps
        if command.start_step is None or command.start_step <= self._num_steps:
            self._begin()
        return f"The profile goes to {self._path()}."

    def step(self) -> None:
        """Count a step; the profile ends by itself with the last of ``num_steps``."""
        self._num_steps += 1
        command = self._command
        if command is None:
            return
        if command.by_stage:
            self._count_stage()
        elif self._profile is None:
            if command.start_step is not None and self._num_steps >= command.start_step:
                self._begin()
        elif self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                self.stop()

    def stop(self) -> str:
        """Write the trace; raises Conflict where no profile runs."""
        if self._command is None:
            raise Conflict("No profile is running; start one first.")
        if self._profile is not None:
            self._write()
        self._command = self._recorded = self._runner.before_step = None
        if not self._written:
            return "No step was computed since the profile began: there is no trace."
        return f"The profile is in {' and '.join(map(str, self._written))}."

    # ------------------------------------------------------------------ stages

    def _before_step(self, num_prefill: int) -> None:
        """Begin the stage of the step that comes, where it has not been recorded; it ends the other one."""
        self._step_stage = stage = "prefill" if num_prefill else "decode"
        if stage in self._stages_left and stage != self._recorded:
            if self._recorded is not None:
                self._end_stage(self._recorded)
            self._begin(stage)

    def _count_stage(self) -> None:
        stage = self._recorded
        if stage is None or stage != self._step_stage:
            return
        self._stages_left[stage] -= 1
        if not self._stages_left[stage]:
            self._end_stage(stage)
            if not self._stages_left:
                self.stop()

    def _end_stage(self, stage: Stage) -> None:
        self._write()
        del self._stages_left[stage]
        self._recorded = None

    # ------------------------------------------------------------------ recording

    def _check(self, command: StartProfile) -> None:
        if command.num_steps is not None and command.num_steps < 1:
            raise InvalidRequest(f"num_steps must be 1 or more, not {command.num_steps}.", param="num_steps")
        if command.start_step is not None and command.start_step < 0:
            raise InvalidRequest(f"start_step must be 0 or more, not {command.start_step}.", param="start_step")
        if command.by_stage and (command.num_steps is None or command.start_step is not None):
            raise InvalidRequest("profile_by_stage needs num_steps, the steps of each stage, and no start_step.",
                                 param="profile_by_stage")
        for name in (command.prefix, command.profile_id):
            if name is not None and Path(name).name != name:
                raise InvalidRequest(f"A profile's file cannot be named after {name[:80]!r}.", param="profile_prefix")
        if "CUDA_PROFILER" in command.activities and self._device.type != "cuda":
            raise InvalidRequest("The activity CUDA_PROFILER needs a GPU.", param="activities")

    def _path(self, stage: Stage | None = None) -> Path:
        assert self._command is not None
        return Path(self._command.folder) / f"{self._name}{f'-{stage}' if stage else ''}.trace.json.gz"

    def _begin(self, stage: Stage | None = None) -> None:
        from torch.profiler import ProfilerActivity, profile

        command = self._command
        assert command is not None
        kinds = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
        activities = [kinds[name] for name in command.activities
                      if name in kinds and (name != "GPU" or self._device.type == "cuda")]
        self._recorded, self._target = stage, self._path(stage)
        self._profile = profile(activities=activities or [ProfilerActivity.CPU], with_stack=command.with_stack,
                                record_shapes=command.record_shapes)
        if "CUDA_PROFILER" in command.activities:
            torch.cuda.profiler.start()
        self._profile.start()

    def _write(self) -> None:
        recorded, self._profile = self._profile, None
        assert recorded is not None and self._command is not None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        recorded.stop()
        if "CUDA_PROFILER" in self._command.activities:
            torch.cuda.profiler.stop()
        recorded.export_chrome_trace(str(self._target))
        self._written.append(self._target)
