"""The line that tells every few seconds what a router does, while it does something."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from .dashboard import Sample, Sampler

logger = logging.getLogger("baton.router")


async def tell_activity(sampler: Sampler, interval: float) -> None:
    """Until it is cancelled, sum up the samples of each ``interval`` seconds; a router without work is silent."""
    while True:
        await asyncio.sleep(interval)
        last = [*sampler.samples][-max(1, round(interval)):]
        if fields := summed(last, interval):
            logger.info("serving", extra={"fields": fields})


def summed(samples: list[Sample], interval: float) -> dict[str, Any] | None:
    """None where nothing ran and nothing happened."""
    if not any(sample.requests or sample.running or sample.queued for sample in samples):
        return None

    def total(name: str) -> int:
        return sum(getattr(sample, name) for sample in samples)

    now, decisions = samples[-1], total("decisions")
    told = {"running": now.running, "queued": now.queued, "requests_s": round(total("requests") / interval, 1),
            "cache_hit_rate": round(total("hits") / decisions, 3) if decisions else 0.0,
            "failed": total("failures"), "retried": total("retries"), "broken": total("broken"),
            "refused": total("refused"), "left": total("left"), "workers": now.healthy}
    if now.healthy_prefill is not None:
        told["prefill_workers"] = now.healthy_prefill
    return told
