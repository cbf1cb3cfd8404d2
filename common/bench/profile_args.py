"""Settings of the profiler's trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..api.errors import ConfigError
from ..config.cli import flag


@dataclass(frozen=True)
class ProfileArgs:
    """Defaults that are None are the engine's: its temporary folder, all steps."""

    profile: bool = flag(False, help=(
        "also record torch.profiler's trace, which ui.perfetto.dev and chrome://tracing open"))
    profile_output_dir: str | None = flag(None, help=(
        "folder for the trace, on the engine's host; the default is its temporary one"))
    profile_num_steps: int | None = flag(None, help="number of steps to record (of bench_one_batch, decode steps: 10)")
    profile_activities: tuple[Literal["CPU", "GPU"], ...] = flag(("CPU", "GPU"), help="what is recorded")

    def __post_init__(self) -> None:
        if not self.profile and (self.profile_output_dir is not None or self.profile_num_steps is not None
                                 or self.profile_activities != ("CPU", "GPU")):
            raise ConfigError("--profile-output-dir, --profile-num-steps and --profile-activities need --profile.")
        if self.profile_num_steps is not None and self.profile_num_steps < 1:
            raise ConfigError(f"--profile-num-steps must be 1 or more, not {self.profile_num_steps}.")
        if not self.profile_activities:
            raise ConfigError("--profile-activities needs CPU, GPU or both.")
