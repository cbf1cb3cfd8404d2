"""The line that tells every few seconds what a router does, while it does something."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

from ..obs.metrics import Metrics
from .cluster_view import ClusterView

logger = logging.getLogger("baton.router")


class _Totals(NamedTuple):
    """What was counted since the start, of requests that were to be relayed: probes and scrapes are no work."""

    requests: int
    failed: int
    retried: int
    broken: int
    refused: int
    left: int
    decisions: int
    hits: int


async def tell_activity(router: ClusterView, interval: float) -> None:
    """Until it is cancelled, sum up each ``interval`` seconds; a router without work is silent."""
    before = _totals(router.metrics)
    while True:
        await asyncio.sleep(interval)
        now = _totals(router.metrics)
        if fields := _fields(router, _Totals(*(b - a for a, b in zip(before, now))), interval):
            logger.info("serving", extra={"fields": fields})
        before = now


def _totals(metrics: Metrics) -> _Totals:
    relayed = {key: count for key, count in metrics.requests.items() if key[0] in metrics.durations}
    return _Totals(
        requests=sum(relayed.values()), failed=sum(count for (_, status), count in relayed.items() if status >= 500),
        retried=sum(metrics.retries.values()), broken=metrics.broken_streams,
        refused=sum(metrics.admission.refused.values()) if metrics.admission is not None else 0,
        left=metrics.client_disconnects,
        decisions=sum(count for (_, reason), count in metrics.decisions.items() if reason != "only"),
        hits=sum(count for (_, reason), count in metrics.decisions.items() if reason == "cache_hit"))


def _fields(router: ClusterView, told: _Totals, interval: float) -> dict[str, Any] | None:
    """None where nothing ran and nothing happened."""
    pairs = router.config.workers.pd_disaggregation
    running = sum(worker.load for worker in router.registry if worker.role == ("decode" if pairs else "regular"))
    queued = router.metrics.admission.queued if router.metrics.admission is not None else 0
    if not any((running, queued, *told)):
        return None
    return {
        "running": running, "queued": queued, "requests_s": round(told.requests / interval, 1),
        "cache_hit_rate": round(told.hits / told.decisions, 3) if told.decisions else 0.0, "failed": told.failed,
        "retried": told.retried, "broken": told.broken, "refused": told.refused, "left": told.left, **router.counts()}
