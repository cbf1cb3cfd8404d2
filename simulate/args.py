"""Settings of ``baton_simulate``."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.api.errors import ConfigError
from ..common.bench.report.goodput import Slo
from ..common.config.cli import flag, nested
from ..common.config.rules import at_least
from ..common.config.server import ScheduleArgs
from ..common.registry import Choices
from ..router.config.policy import PolicyArgs
from .costs import model
from .workload.formats.base import TRACE_FORMATS
from .workload.synthetic import Lengths

DEFAULT_COSTS = "llama-3-8b-h200"


@dataclass(frozen=True)
class WorkloadArgs:
    trace: str | None = flag(None, help="file of requests to replay; without it they are synthetic")
    trace_format: str | None = flag(None, choices=Choices.of(TRACE_FORMATS), help=(
        "its format: mooncake (JSONL), azure (CSV), burstgpt (CSV), sharegpt (JSON, without times); the default is "
        "found by its first line"))
    num_requests: int | None = flag(None, help="requests: of a trace the first ones (default: all), else 1000")
    rate: float | None = flag(None, help=(
        "requests a second; a trace is stretched or compressed to it (default: the trace's own, else 4)"))
    arrival_cv: float = flag(1.0, help=(
        "coefficient of variation of synthetic intervals: 1 is a Poisson process, 0 even, more is bursty (Gamma)"))
    input_len: str = flag("1024", help="prompt tokens of synthetic requests: MEAN, or MEAN:CV of a log-normal one")
    output_len: str = flag("256", help="output tokens, likewise")
    shared_prefix_groups: int = flag(0, help="groups of synthetic prompts that begin with equal tokens")
    shared_prefix_len: int = flag(0, help="tokens that each group's prompts begin with, besides --input-len")
    seed: int = flag(0, help="of everything random")

    def __post_init__(self) -> None:
        if self.num_requests is not None:
            at_least(self, 1, "num_requests")
        at_least(self, 0, "shared_prefix_groups", "shared_prefix_len", "seed", "arrival_cv")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise ConfigError(f"--rate must be above 0 requests a second, not {self.rate:g}.")
        if bool(self.shared_prefix_groups) != bool(self.shared_prefix_len):
            raise ConfigError("--shared-prefix-groups and --shared-prefix-len go together.")
        Lengths.parse(self.input_len, "--input-len")
        Lengths.parse(self.output_len, "--output-len")


@dataclass(frozen=True)
class ClusterArgs:
    costs: str = flag(DEFAULT_COSTS, help=(
        "cost table: the name of one that is shipped, or a file that bench_calibrate wrote"))
    prefill_costs: str | None = flag(None, help="cost table of the prefill servers, where it is another")
    unified: int | None = flag(None, help="number of unified servers (default: 1 without --prefill and --decode)")
    prefill: int = flag(0, help="number of prefill servers")
    decode: int = flag(0, help="number of decode servers")
    max_total_tokens: int | None = flag(None, help="tokens of KV cache of each server (default: the cost table's)")
    disable_radix_cache: bool = flag(False, help="without the prefix cache")

    def __post_init__(self) -> None:
        if self.max_total_tokens is not None:
            at_least(self, 1, "max_total_tokens")

    @property
    def num_unified(self) -> int:
        return self.unified if self.unified is not None else int(not (self.prefill or self.decode))

    def loaded(self) -> tuple[model.Costs, model.Costs | None]:
        """The cost tables of all servers, and of prefill servers where they differ. Raises ConfigError."""
        return model.load(self.costs), None if self.prefill_costs is None else model.load(self.prefill_costs)


@dataclass(frozen=True)
class OutputArgs:
    goodput: tuple[str, ...] = flag((), metavar="METRIC:MS", help=(
        "service level objective: ttft, tpot and e2e in milliseconds, as in ttft:500 tpot:20"))
    output_file: str | None = flag(None, help="append the figures to this file, as a line of JSON")
    output_details: bool = flag(False, help="with times of each request in that line")
    html: str | None = flag(None, help="write a page with tables and plots, which needs no network")
    plot: str | None = flag(None, help="write the plots alone, as SVG")
    validate: bool = flag(False, help=(
        "simulate runs that were measured on real servers, in place of a workload, and print the errors"))
    measured_runs: tuple[str, ...] = flag((), metavar="FILE", help=(
        "files of measured runs to validate by (default: those that are shipped)"))

    def __post_init__(self) -> None:
        Slo.parse(self.goodput)
        if self.output_details and self.output_file is None:
            raise ConfigError("--output-details needs --output-file.")
        if self.measured_runs and not self.validate:
            raise ConfigError("--measured-runs needs --validate.")
        if self.validate and (self.output_file or self.plot):
            raise ConfigError("--validate prints a table, and writes --html: leave --output-file and --plot out.")


NOT_SIMULATED = {
    "max_queued_requests": "no request is refused", "max_prompts_per_request": "requests have one prompt",
    "request_timeout": "no request times out", "retract_host_memory_gb": "retracted requests are computed again",
    **dict.fromkeys(("enable_priority_scheduling", "schedule_low_priority_values_first",
                     "priority_scheduling_preemption_threshold", "default_priority_value",
                     "abort_on_priority_when_disabled"), "requests have no priority")}
"""Flags of the scheduler that a simulation does not have, with the reasons."""
NOT_ROUTED = {
    **dict.fromkeys(("host_page_cost", "storage_page_cost"), "there are no KV tiers"),
    **dict.fromkeys(("hash_header", "assignment_mode", "max_idle_secs", "bucket_adjust_interval_secs",
                     "prefix_token_count", "prefix_hash_load_factor"), "their policies are not simulated")}
"""Likewise of the router."""


@dataclass(frozen=True)
class Simulate:
    """The configuration of ``baton_simulate``."""

    workload: WorkloadArgs
    cluster: ClusterArgs
    output: OutputArgs
    schedule: ScheduleArgs = nested(omit=NOT_SIMULATED)
    policy: PolicyArgs = nested(omit=NOT_ROUTED)
