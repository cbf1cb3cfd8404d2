"""Log lines of how long the stages of requests took (--enable-request-time-stats-logging)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ...api.messages import Generate, LatencySpan

log = logging.getLogger("baton.requests")


class TimeStats:
    """Asks the engine for the stages of requests, and logs them when they end."""

    def __init__(self, last_stage: str):
        """``last_stage``: the one during which an answer ends, for the engine reports ends of stages alone."""
        self._last_stage = last_stage

    def start(self, requests: Sequence[Generate]) -> None:
        for request in requests:
            request.traced = True

    def end(self, rid: str, outcome: str, *, arrived: float, stages: Sequence[LatencySpan], num_prompt_tokens: int,
            num_output_tokens: int) -> None:
        """Logs a line; ``arrived`` on the monotonic clock, in seconds."""
        fields: dict[str, object] = {"rid": rid, "outcome": outcome, "prompt_tokens": num_prompt_tokens,
                                     "output_tokens": num_output_tokens}
        began, now = arrived, time.monotonic()
        for name, end in [*((each.name, each.end) for each in stages), *([(self._last_stage, now)] if stages else [])]:
            fields[f"{name}_ms"] = round(1000 * (end - began), 2)
            began = end
        fields["total_ms"] = round(1000 * (now - arrived), 2)
        log.info("request times", extra={"fields": fields})
