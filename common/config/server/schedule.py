"""Flags of the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...api.errors import ConfigError
from ...registry import Choices, Registry
from ..cli import flag

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
    disable_overlap_schedule: bool = flag(False, help=(
        "process each step's results before the next step is launched (always so on a CPU)"))
    schedule_policy: str = flag("fcfs", choices=Choices.of(SCHEDULE_POLICIES), help=(
        "order of waiting requests: first come first served, longest prefix match, depth-first by subtree of the "
        "prefix cache, longest output, or random"))
    schedule_conservativeness: float = flag(1.0, help=(
        "scales the share of running requests' output that is reserved before another one is admitted: larger for "
        "fewer retractions, 0 for the largest batches"))
    enable_priority_scheduling: bool = flag(False, help=(
        "more urgent requests (the field priority, larger first) run first, and preempt others"))
    schedule_low_priority_values_first: bool = flag(False, help="smaller values of priority are more urgent")
    priority_scheduling_preemption_threshold: int = flag(10, help=(
        "a waiting request preempts running ones that are less urgent by more than this"))
    default_priority_value: int = flag(0, help="priority of requests without one")
    enable_mixed_chunk: bool = flag(False, help=(
        "decode in every step, along with chunks of prompts: smoother streams, without CUDA graphs while prompts are "
        "computed; the decode tokens count in --chunked-prefill-size"))
    retract_host_memory_gb: float = flag(0.0, help=(
        "host memory of each rank, in GiB, for the KV cache of retracted requests, used where copying is cheaper "
        "than computing again (0: always compute)"))
    request_timeout: float = flag(3600.0, help="seconds after which a request that has not ended fails with 504")

    def __post_init__(self) -> None:
        if self.chunked_prefill_size < 1 and self.chunked_prefill_size != -1:
            raise ConfigError(f"--chunked-prefill-size must be 1 or more, or -1 for whole prompts, not "
                              f"{self.chunked_prefill_size}.")
        least = {"--max-running-requests": (self.max_running_requests, 1),
                 "--max-queued-requests": (self.max_queued_requests, 0),
                 "--max-prompts-per-request": (self.max_prompts_per_request, 1),
                 "--max-prefill-tokens": (self.max_prefill_tokens, 1),
                 "--schedule-conservativeness": (self.schedule_conservativeness, 0),
                 "--priority-scheduling-preemption-threshold": (self.priority_scheduling_preemption_threshold, 0),
                 "--retract-host-memory-gb": (self.retract_host_memory_gb, 0)}
        for name, (value, bound) in least.items():
            if not value >= bound:
                raise ConfigError(f"{name} must be {bound} or more, not {value}.")
        if not self.request_timeout > 0:
            raise ConfigError(f"--request-timeout must be above 0, not {self.request_timeout:g}.")
        if self.enable_priority_scheduling:
            return
        defaults = ScheduleArgs.__dataclass_fields__
        for field in ("schedule_low_priority_values_first", "priority_scheduling_preemption_threshold",
                      "default_priority_value"):
            if getattr(self, field) != defaults[field].default:
                raise ConfigError(f"--{field.replace('_', '-')} needs --enable-priority-scheduling.")

    @property
    def lowest_priority(self) -> int:
        """The priority of the least urgent request."""
        return 2**31 - 1 if self.schedule_low_priority_values_first else -(2**31)

    def largest_prefill(self, context_length: int) -> int:
        """Most prompt tokens of one step."""
        if self.chunked_prefill_size > 0:
            return self.chunked_prefill_size
        return max(self.max_prefill_tokens, context_length)
