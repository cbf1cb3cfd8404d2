"""Settings of ``bench_draft_acceptance``: a data set, and an engine's flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..api.errors import ConfigError
from ..config.cli import flag
from ..config.server import CacheArgs, KernelArgs, ModelArgs, ScheduleArgs, ServerConfig, SpeculativeArgs
from .workloads.dataset_args import DatasetArgs


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
        """The engine's, with room for one sequence of ``longest`` tokens unless the flags say how much. Raises
        ConfigError where they say too little."""
        cache = self.cache
        if cache.max_total_tokens is None:
            cache = dataclasses.replace(cache, max_total_tokens=longest + cache.page_size)
        elif cache.max_total_tokens // cache.page_size < -(-longest // cache.page_size):
            raise ConfigError(f"--max-total-tokens {cache.max_total_tokens} has no room for {longest} tokens of prompt "
                              "and answer.")
        return ServerConfig(self.model, cache, self.schedule, kernels=self.kernels,
                            speculative=SpeculativeArgs(speculative_algorithm="NEXTN"))
