"""Log lines of how long the stages of requests took (--enable-request-time-stats-logging)."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ...api.messages import Generate, LatencySpan

log = logging.getLogger("baton.requests")


class TimeStats:
    """Asks the engine for the stages of requests, and logs them when they end."""

    def start(self, requests: Sequence[Generate]) -> None:
        for request in requests:
            request.traced = True

    def end(self, rid: str, outcome: str, *, arrived: float, stages: Sequence[LatencySpan], num_prompt_tokens: int,
            num_output_tokens: int) -> None:
        """Logs a line; ``arrived`` on the monotonic clock, in seconds."""
        fields: dict[str, object] = {"rid": rid, "outcome": outcome, "prompt_tokens": num_prompt_tokens,
                                     "output_tokens": num_output_tokens}
        began = arrived
        for stage in stages:
            fields[f"{stage.name}_ms"] = round(1000 * (stage.end - began), 2)
            began = stage.end
        fields["total_ms"] = round(1000 * ((began if stages else time.monotonic()) - arrived), 2)
        log.info("request times", extra={"fields": fields})
