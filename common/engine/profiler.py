"""torch.profiler around an engine's steps."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..api.errors import Conflict, InvalidRequest
from ..commands.profile import StartProfile

if TYPE_CHECKING:
    from torch.profiler import profile


class Profiler:
    """Profiler of one rank. ``step`` must be called after every step while ``active``."""

    def __init__(self, rank: int, device: torch.device):
        self._rank = rank
        self._device = device
        self._profile: profile | None = None
        self._target = Path()
        self._steps_left: int | None = None

    @property
    def active(self) -> bool:
        return self._profile is not None

    def start(self, command: StartProfile) -> str:
        """Raises Conflict while a profile runs, InvalidRequest for a folder that cannot be written."""
        if self._profile is not None:
            raise Conflict("A profile is running; stop it first.")
        if command.num_steps is not None and command.num_steps < 1:
            raise InvalidRequest(f"num_steps must be 1 or more, not {command.num_steps}.", param="num_steps")
        folder = Path(command.folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"Cannot make the folder {folder}: {error.strerror}.", param="output_dir") from None
        from torch.profiler import ProfilerActivity, profile

        kinds = {"CPU": ProfilerActivity.CPU, "GPU": ProfilerActivity.CUDA}
        activities = [kinds[name] for name in command.activities if name != "GPU" or self._device.type == "cuda"]
        self._profile = profile(activities=activities or [ProfilerActivity.CPU], with_stack=command.with_stack,
                                record_shapes=command.record_shapes)
        self._steps_left = command.num_steps
        # Servers that share a folder may start in the same second.
        name = f"baton-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-rank{self._rank}"
        self._target = folder / f"{name}.trace.json.gz"
        self._profile.start()
        return f"The profile goes to {self._target}."

    def step(self) -> None:
        """Count a step; the profile ends by itself with the last of ``num_steps``."""
        if self._steps_left is None:
            return
        self._steps_left -= 1
        if self._steps_left == 0:
            self.stop()

    def stop(self) -> str:
        """Write the trace; raises Conflict where no profile runs."""
        if self._profile is None:
            raise Conflict("No profile is running; start one first.")
        recorded, self._profile = self._profile, None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        recorded.stop()
        recorded.export_chrome_trace(str(self._target))
        return f"The profile is in {self._target}."
