"""Settings of ``bench_offline_throughput``: a data set, and an engine's flags."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ..api.errors import ConfigError
from ..config.cli import flag
from ..config.server import (
    CacheArgs,
    DataParallelArgs,
    KernelArgs,
    ModelArgs,
    ParallelArgs,
    ScheduleArgs,
    SpeculativeArgs,
)
from .profile_args import ProfileArgs
from .workloads.dataset_args import DatasetArgs


@dataclass(frozen=True)
class OfflineArgs:
    pair: bool = flag(False, help="a prefill and a decode engine that hand the KV cache over, in place of one for both")
    decode_base_gpu_id: int | None = flag(None, help="with --pair, the decode engine's first GPU, if it has its own")
    max_concurrency: int | None = flag(None, help="requests that are open together at most; the default is all")
    disable_ignore_eos: bool = flag(False, help="let answers end where the model ends them")
    skip_warmup: bool = flag(False, help="begin without a request that is not counted")
    output_file: str | None = flag(None, names=("--result-filename",), help=(
        "append settings and figures to this file, a JSON object"))
    tag: str | None = flag(None, help="a name for the run in --output-file")
    disable_progress: bool = flag(False, names=("--disable-tqdm",), help="show no progress")

    def __post_init__(self) -> None:
        if self.decode_base_gpu_id is not None and not self.pair:
            raise ConfigError("--decode-base-gpu-id needs --pair.")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"--max-concurrency must be 1 or more, not {self.max_concurrency}.")


@dataclass(frozen=True)
class BenchOffline:
    offline: OfflineArgs
    dataset: DatasetArgs
    profile: ProfileArgs
    model: ModelArgs
    cache: CacheArgs
    schedule: ScheduleArgs
    parallel: ParallelArgs
    kernels: KernelArgs
    data_parallel: DataParallelArgs
    speculative: SpeculativeArgs

    @property
    def engine_flags(self) -> dict[str, Any]:
        """``baton.Engine``'s keywords: what differs from the defaults."""
        sections = (self.model, self.cache, self.schedule, self.parallel, self.kernels, self.data_parallel,
                    self.speculative)
        return {field.name: value for section in sections for field in fields(section)
                if (value := getattr(section, field.name)) != field.default} | {"log_level": "warning"}

    @property
    def most_open(self) -> int:
        """Requests at once: as asked for, and no more than the engine takes on."""
        held = self.schedule.max_queued_requests + self.schedule.max_running_requests
        return min(held, self.offline.max_concurrency or held)
