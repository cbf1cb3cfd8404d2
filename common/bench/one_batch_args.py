"""Settings of ``bench_one_batch``; names are SGLang's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..api.errors import ConfigError
from ..config.cli import flag, nested
from ..config.server import CacheArgs, KernelArgs, ModelArgs, ParallelArgs, ScheduleArgs, ServerConfig, SpeculativeArgs
from .profile_args import ProfileArgs

_SHORT_PROMPT = 64  # tokens that a prompt of the correctness test has at most


@dataclass(frozen=True)
class BatchArgs:
    batch_size: tuple[int, ...] = flag((1,), names=("--batch",), help="requests that run together")
    input_len: tuple[int, ...] = flag((1024,), names=("--input",), help="prompt tokens of each")
    output_len: tuple[int, ...] = flag((16,), names=("--output",), help="output tokens of each")
    repeat: int = flag(3, help="timed runs of each case, after one that is not timed")
    correctness_test: bool = flag(False, help=(
        "print the model's answers to three prompts, --output-len tokens each, in place of measuring"))
    parts: bool = flag(True, help="also tell what part of a step's time each part of the model takes")
    output_file: str | None = flag(None, names=("--result-filename",), help=(
        "append settings and figures to this file, a JSON object a case"))
    tag: str | None = flag(None, names=("--run-name",), help="a name for the run in --output-file")
    disable_progress: bool = flag(False, names=("--disable-tqdm",), help="show no progress")

    def __post_init__(self) -> None:
        for name in ("batch_size", "input_len", "output_len"):
            if min(getattr(self, name), default=0) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} takes numbers of 1 or more.")
        if self.repeat < 1:
            raise ConfigError(f"--repeat must be 1 or more, not {self.repeat}.")

    @property
    def cases(self) -> list[tuple[int, int, int]]:
        """(batch, input, output), in the order of the flags."""
        if self.correctness_test:
            return [(3, _SHORT_PROMPT, max(self.output_len))]
        return [(batch, given, made) for given in self.input_len for made in self.output_len
                for batch in self.batch_size]


@dataclass(frozen=True)
class BenchOneBatch:
    batches: BatchArgs
    profile: ProfileArgs
    model: ModelArgs
    cache: CacheArgs
    schedule: ScheduleArgs
    kernels: KernelArgs
    speculative: SpeculativeArgs
    parallel: ParallelArgs = nested(omit={
        **dict.fromkeys(("pp_size", "pp_max_micro_batch_size", "pp_layer_partition"),
                        "stages need a server: bench_one_batch_server starts one"),
        **dict.fromkeys(("enable_eplb", "ep_num_redundant_experts", "eplb_rebalance_num_iterations",
                         "eplb_algorithm", "eplb_rebalance_layers_per_chunk", "init_expert_location",
                         "eplb_min_rebalancing_utilization_threshold", "expert_distribution_recorder_mode",
                         "expert_distribution_recorder_buffer_size", "enable_expert_distribution_metrics"),
                        "random tokens do not tell which experts are busy")})

    @property
    def server(self) -> ServerConfig:
        """The engine's, with room for the largest case unless the flags say how much."""
        cache, largest = self.cache, max(self.batches.batch_size)
        if cache.max_total_tokens is None:
            longest = max(given + made for _, given, made in self.batches.cases)
            if self.speculative.speculative_algorithm is not None:
                longest += 2 * self.speculative.num_drafts
            pages = largest * (-(-longest // cache.page_size) + 2)
            cache = dataclasses.replace(cache, max_total_tokens=pages * cache.page_size)
        schedule = self.schedule
        if schedule.max_running_requests < largest:
            schedule = dataclasses.replace(schedule, max_running_requests=largest)
        return ServerConfig(self.model, cache, schedule, self.parallel, self.kernels, speculative=self.speculative)
