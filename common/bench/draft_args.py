"""Settings of ``bench_draft_acceptance``: a data set, and an engine's flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..config.cli import flag
from ..config.server import CacheArgs, KernelArgs, ModelArgs, ScheduleArgs, ServerConfig
from .dataset_args import DatasetArgs


@dataclass(frozen=True)
class DraftArgs:
    output_file: str | None = flag(None, names=("--result-filename",), help=(
        "append settings and figures to this file, a JSON object"))
    tag: str | None = flag(None, help="a name for the run in --output-file")
    disable_progress: bool = flag(False, names=("--disable-tqdm",), help="show no progress")


@dataclass(frozen=True)
class BenchDraft:
    draft: DraftArgs
    dataset: DatasetArgs
    model: ModelArgs
    cache: CacheArgs
    schedule: ScheduleArgs
    kernels: KernelArgs

    def server(self, longest: int) -> ServerConfig:
        """The engine's, with room for one sequence of ``longest`` tokens."""
        cache = dataclasses.replace(self.cache, max_total_tokens=longest + self.cache.page_size)
        return ServerConfig(self.model, cache, self.schedule, kernels=self.kernels)
