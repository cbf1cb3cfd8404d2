"""The activity log: a line every few seconds with what the router does, while it does something."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

from ..obs.metrics import Metrics
from ..workers.roles import answering_role
from .cluster_view import ClusterView

logger = logging.getLogger("baton.router")


class _Totals(NamedTuple):
    """Counts since the start, of requests to relay only: probes and scrapes are no work."""

    requests: int
    failed: int
    retried: int
    broken: int
    refused: int
    left: int
    decisions: int
    hits: int


async def log_activity(router: ClusterView, interval: float) -> None:
    """Logs each ``interval`` seconds until it is cancelled; a router without work is silent."""
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


def _fields(router: ClusterView, totals: _Totals, interval: float) -> dict[str, Any] | None:
    """Returns the line's fields; None where nothing ran and nothing happened."""
    role = answering_role(pairs=router.config.workers.pd_disaggregation)
    running = sum(worker.load for worker in router.registry if worker.role == role)
    queued = router.metrics.admission.queued if router.metrics.admission is not None else 0
    if not any((running, queued, *totals)):
        return None
    return {
        "running": running, "queued": queued, "requests_s": round(totals.requests / interval, 1),
        "cache_hit_rate": round(totals.hits / totals.decisions, 3) if totals.decisions else 0.0,
        "failed": totals.failed, "retried": totals.retried, "broken": totals.broken, "refused": totals.refused,
        "left": totals.left, **router.counts()}
