"""A log line of the engine's load and throughput every few seconds, while the server has work."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from ..api.errors import WorkerUnavailable
from ..api.merged_states import merge_states
from ..api.messages import State
from ..obs.metrics import TokenTotals
from .context.serving_context import ServingContext
from .web import failures

log = logging.getLogger("baton.server")


class StatsLogger:
    """Logs the engine's requests and cache, and tokens since the last line; an idle server logs nothing."""

    def __init__(self, context: ServingContext, interval: float):
        """``interval``: seconds between two lines, above 0."""
        self._context = context
        self._interval = interval
        self._last = self._totals()

    async def run(self) -> None:
        """Runs until it is cancelled. The engine's state is read once an interval, also while it is idle."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(self._interval)
            try:
                state = merge_states(await self._context.client.states())
            except WorkerUnavailable:
                continue
            now = time.monotonic()
            if fields := self._fields(state, now - began):
                log.info("serving", extra={"fields": fields})
            began = now

    def _totals(self) -> tuple[TokenTotals, int]:
        return self._context.telemetry.metrics.tokens, failures.count

    def _fields(self, state: State, seconds: float) -> dict[str, Any] | None:
        """The line's fields; None where nothing runs and nothing happened."""
        (before, failed_before), (now, failed) = self._last, self._totals()
        self._last = now, failed
        if self._last == (before, failed_before) and not state.num_running + state.num_waiting + state.num_transferring:
            return None
        prompt, cached = now.prompt - before.prompt, now.cached - before.cached
        return {
            "running": state.num_running, "waiting": state.num_waiting, "transferring": state.num_transferring,
            "token_usage": round(state.gauges["token_usage"], 3),
            "cache_hit_rate": round(cached / prompt, 3) if prompt else 0.0,
            "prompt_tok_s": round(prompt / seconds, 1),
            "output_tok_s": round((now.generated - before.generated) / seconds, 1),
            "failed": failed - failed_before}
