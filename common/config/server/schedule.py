"""Flags of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ...api.errors import ConfigError
from ...registry import Choices, Registry
from ..cli import flag
from ..rules import Rule, ServerRule, at_least, check_own_rules

if TYPE_CHECKING:
    from ...scheduler.policies.order import OrderFactory

SCHEDULE_POLICIES: Registry[OrderFactory] = Registry("schedule policy", "baton.common.scheduler.policies")
"""Trait "prefix_cache": the policy sorts by the contents of the prefix cache."""


@dataclass(frozen=True)
class ScheduleArgs:
    max_running_requests: int = flag(256, help="most requests that decode together")
    max_queued_requests: int = flag(4096, help="most waiting requests; further ones get 429")
    max_prompts_per_request: int = flag(2048, help=(
        "most prompts of one request (documents of a rerank, inputs of embeddings, prompts of a completion); more "
        "get 400 before any work"))
    chunked_prefill_size: int = flag(8192, help="most prompt tokens that one step computes; -1 computes prompts whole")
    max_prefill_tokens: int = flag(16384, help=(
        "most prompt tokens of a step of several prompts: a further prompt joins only within this"))
    prefill_max_requests: int | None = flag(None, help="most prompts that one step computes tokens of")
    disable_overlap_schedule: bool = flag(False, help=(
        "process each step's results before the next step is launched (always so on a CPU)"))
    schedule_policy: str = flag("fcfs", choices=Choices.of(SCHEDULE_POLICIES), help=(
        "order of waiting requests: first come first served, longest prefix match, depth-first by subtree of the "
        "prefix cache, longest output, random, or least slack to their slo_ttft_ms"))
    default_slo_ttft_ms: float = flag(10_000.0, help=(
        "slo_ttft_ms of requests that give none, for --schedule-policy slo"))
    schedule_conservativeness: float = flag(1.0, help=(
        "scales the share of running requests' output that is reserved before another one is admitted: larger for "
        "fewer retractions, 0 for the largest batches"))
    schedule_backfill_ratio: float = flag(4.0, help=(
        "requests behind one that does not fit may be admitted before it until they have taken this many times the KV "
        "pages that it takes; then what becomes free is left for it. 0: none passes it"))
    enable_priority_scheduling: bool = flag(False, help=(
        "more urgent requests (the field priority, larger first) run first, and preempt others"))
    schedule_low_priority_values_first: bool = flag(False, help="smaller values of priority are more urgent")
    priority_scheduling_preemption_threshold: int = flag(10, help=(
        "a waiting request preempts running ones that are less urgent by more than this"))
    default_priority_value: int = flag(0, help="priority of requests without one")
    abort_on_priority_when_disabled: bool = flag(False, help=(
        "refuse requests with a priority while there is no --enable-priority-scheduling, instead of ignoring it"))
    enable_mixed_chunk: bool = flag(False, help=(
        "decode in every step, along with chunks of prompts: smoother streams, without CUDA graphs while prompts are "
        "computed; the decode tokens count in --chunked-prefill-size"))
    retract_host_memory_gb: float = flag(0.0, help=(
        "host memory of each rank, in GiB, for the KV cache of retracted requests, used where copying is cheaper "
        "than computing again (0: always compute)"))
    request_timeout: float = flag(3600.0, help="seconds after which a request that has not ended fails with 504")

    own_flag_rules: ClassVar[tuple[Rule[ScheduleArgs], ...]] = (
        Rule(lambda c: c.schedule_low_priority_values_first and not c.enable_priority_scheduling,
             "--schedule-low-priority-values-first needs --enable-priority-scheduling."),
        Rule(lambda c: c.priority_scheduling_preemption_threshold != 10 and not c.enable_priority_scheduling,
             "--priority-scheduling-preemption-threshold needs --enable-priority-scheduling."),
        Rule(lambda c: c.abort_on_priority_when_disabled and c.enable_priority_scheduling,
             "--abort-on-priority-when-disabled is for servers without --enable-priority-scheduling: leave one out."),
        Rule(lambda c: c.default_priority_value and not c.enable_priority_scheduling,
             "--default-priority-value needs --enable-priority-scheduling."),
    )
    flag_rules: ClassVar[tuple[ServerRule, ...]] = (
        Rule(lambda c: SCHEDULE_POLICIES.has(c.schedule.schedule_policy, "prefix_cache")
             and c.cache.disable_radix_cache,
             "--schedule-policy {schedule.schedule_policy} needs the prefix cache; drop --disable-radix-cache, or "
             "choose another policy."),
        Rule(lambda c: c.schedule.enable_mixed_chunk and (not c.duties.decodes or c.model.is_embedding),
             "--enable-mixed-chunk is for servers that decode; leave it out here."),
        Rule(lambda c: c.schedule.enable_mixed_chunk and c.parallel.pp_size > 1,
             "--enable-mixed-chunk does not work across the stages of --pp-size: leave one of them out."),
        Rule(lambda c: c.schedule.retract_host_memory_gb and (not c.duties.decodes or c.model.is_embedding),
             "--retract-host-memory-gb is for servers that decode; leave it out here."),
        Rule(lambda c: c.schedule.retract_host_memory_gb and c.parallel.pp_size > 1,
             "--retract-host-memory-gb does not work across the stages of --pp-size: leave one of them out."),
        Rule(lambda c: c.schedule.retract_host_memory_gb and c.tiers.enable_hierarchical_cache,
             "--enable-hierarchical-cache keeps retracted requests too: leave --retract-host-memory-gb out."),
    )

    def __post_init__(self) -> None:
        if self.chunked_prefill_size < 1 and self.chunked_prefill_size != -1:
            raise ConfigError(f"--chunked-prefill-size must be 1 or more, or -1 for whole prompts, not "
                              f"{self.chunked_prefill_size}.")
        at_least(self, 1, "max_running_requests", "max_prompts_per_request", "max_prefill_tokens",
                 "prefill_max_requests")
        at_least(self, 0, "max_queued_requests", "schedule_conservativeness", "schedule_backfill_ratio",
                 "priority_scheduling_preemption_threshold", "retract_host_memory_gb")
        if not self.request_timeout > 0:
            raise ConfigError(f"--request-timeout must be above 0, not {self.request_timeout:g}.")
        check_own_rules(self)

    @property
    def lowest_priority(self) -> int:
        """The priority of the least urgent request."""
        return 2**31 - 1 if self.schedule_low_priority_values_first else -(2**31)

    @property
    def without_decoding(self) -> ScheduleArgs:
        """The flags of a pair's prefill server: those for decoding have their defaults."""
        return replace(self, enable_mixed_chunk=False, retract_host_memory_gb=0.0)

    def largest_prefill(self, context_length: int) -> int:
        """Most prompt tokens of one step."""
        if self.chunked_prefill_size > 0:
            return self.chunked_prefill_size
        return max(self.max_prefill_tokens, context_length)
