"""What a request's priority means: who comes first, and who may take whose place."""

from __future__ import annotations

from dataclasses import dataclass

from ...config.server import ScheduleArgs
from ...request.req import Req


@dataclass(frozen=True)
class Priorities:
    """``--enable-priority-scheduling`` and what goes with it; disabled, all requests are alike."""

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
        """Whether ``running`` gives way to ``req``: it is less urgent by more than the threshold."""
        return self.enabled and self.urgency(req) - self.urgency(running) > self.threshold
