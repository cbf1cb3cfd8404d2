"""Request priorities: which requests run first, and which may preempt others."""

from __future__ import annotations

from dataclasses import dataclass

from ...config.server import ScheduleArgs
from ...request.req import Req


@dataclass(frozen=True)
class Priorities:
    """``--enable-priority-scheduling`` and its related flags; where disabled, all requests are equal."""

    enabled: bool
    sign: int
    default: int
    threshold: int

    @classmethod
    def of(cls, args: ScheduleArgs) -> Priorities:
        return cls(args.enable_priority_scheduling, -1 if args.schedule_low_priority_values_first else 1,
                   args.default_priority_value, args.priority_scheduling_preemption_threshold)

    def urgency(self, req: Req) -> int:
        """Larger comes first."""
        if not self.enabled:
            return 0
        return self.sign * (self.default if req.priority is None else req.priority)

    def may_preempt(self, req: Req, running: Req) -> bool:
        """True where ``running`` is less urgent than ``req`` by more than the threshold."""
        return self.enabled and self.urgency(req) - self.urgency(running) > self.threshold
