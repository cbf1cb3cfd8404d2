"""``/dashboard``: one page that shows the cluster live, and the samples that it plots.

A sample is taken each second from the counters of the metrics: about 20 us a second, also while no page is
open, so that a page just opened shows the last five minutes.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ..config import RouterConfig
from ..net.request import Request
from ..net.responses import Response
from ..obs.metrics import SECONDS, Histogram, Metrics
from ..workers.registry import Registry
from ..workers.roles import SENDER, answering_role
from .worker_reports import WorkerReports

SAMPLES = 300
_PAGE = Path(__file__).with_name("dashboard.html")
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class Sample(msgspec.Struct, frozen=True):
    """One second: counts are of that second, times are in seconds (None: none seen).

    ``running``, ``queued`` and the available workers (``healthy``: decode workers or whole ones; ``healthy_prefill``:
    None where workers are whole) are as of its end.
    """

    at: int
    requests: int
    failures: int
    retries: int
    broken: int
    left: int
    refused: int
    running: int
    queued: int
    healthy: int
    healthy_prefill: int | None
    decisions: int
    hits: int
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    tokens_in: float | None = None
    """Tokens a second of all workers; None while no page is open."""
    tokens_out: float | None = None


class SampledRouter(Protocol):
    """A router, as far as samples need it."""

    config: RouterConfig
    registry: Registry
    metrics: Metrics
    reports: WorkerReports


class DashboardRouter(SampledRouter, Protocol):
    """A router, as far as the page needs it."""

    sampler: Sampler


class Sampler:
    """The last SAMPLES samples, one a second while started."""

    def __init__(self, router: SampledRouter):
        self._router = router
        self.samples: deque[Sample] = deque(maxlen=SAMPLES)
        self._last = self._totals()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(1.0, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self.sample()
        self.start()

    def sample(self) -> None:
        """Adds a sample of what happened since the last one."""
        last, now = self._last, self._totals()
        self._last = now
        ttft = [a - b for a, b in zip(now["ttft"], last["ttft"])]
        itl = [a - b for a, b in zip(now["itl"], last["itl"])]
        counts = {name: now[name] - last[name] for name in ("requests", "failures", "retries", "broken", "left",
                                                            "refused", "decisions", "hits")}
        registry, admission = self._router.registry, self._router.metrics.admission
        pairs = self._router.config.workers.pd_disaggregation
        role = answering_role(pairs=pairs)
        running = sum(worker.load for worker in registry if worker.role == role)
        tokens_in, tokens_out = self._router.reports.tokens() or (None, None)
        self.samples.append(Sample(int(time.time()), running=running, **counts,
                                   queued=admission.queued if admission is not None else 0,
                                   healthy=len(registry.available(role)),
                                   healthy_prefill=len(registry.available(SENDER)) if pairs else None,
                                   ttft_p50=quantile(ttft, 0.5), ttft_p99=quantile(ttft, 0.99),
                                   itl_p50=quantile(itl, 0.5), itl_p99=quantile(itl, 0.99),
                                   tokens_in=tokens_in, tokens_out=tokens_out))

    def _totals(self) -> dict[str, Any]:
        metrics = self._router.metrics
        return {
            "requests": sum(metrics.requests.values()),
            "failures": sum(count for (_, status), count in metrics.requests.items() if status >= 500),
            "retries": sum(metrics.retries.values()), "broken": metrics.broken_streams,
            "left": metrics.client_disconnects,
            "refused": sum(metrics.admission.refused.values()) if metrics.admission is not None else 0,
            "decisions": sum(count for (_, reason), count in metrics.decisions.items() if reason != "only"),
            "hits": sum(count for (_, reason), count in metrics.decisions.items() if reason == "cache_hit"),
            "ttft": _summed(metrics.first_tokens.values()), "itl": _summed(metrics.inter_tokens.values()),
        }


def _summed(histograms: Iterable[Histogram]) -> list[int]:
    return [sum(column) for column in zip([0] * (len(SECONDS) + 1), *(h.counts for h in histograms))]


def quantile(counts: list[int], share: float) -> float | None:
    """Returns a quantile of a histogram over SECONDS, linear within its bucket; None of an empty one."""
    rank = share * sum(counts)
    if not rank:
        return None
    seen = 0
    for index, count in enumerate(counts):
        if count and seen + count >= rank:
            low = SECONDS[index - 1] if index else 0.0
            high = SECONDS[min(index, len(SECONDS) - 1)]
            return low + (high - low) * (rank - seen) / count
        seen += count
    return SECONDS[-1]


def page(router: DashboardRouter, request: Request) -> Response:
    return Response(200, _PAGE.read_bytes(), "text/html; charset=utf-8",
                    (("content-security-policy", _POLICY), ("cache-control", "no-cache")))


def data(router: DashboardRouter, request: Request) -> Response:
    """Returns workers and samples for the page; ``?since=SECONDS`` leaves out samples up to then."""
    name, _, value = request.query.partition(b"=")
    since = int(value) if name == b"since" and value.isdigit() and len(value) < 20 else 0
    samples = [sample for sample in router.sampler.samples if sample.at > since]
    router.reports.request()
    pairs = router.config.workers.pd_disaggregation
    workers = [{**worker.describe(), "failures": router.metrics.worker_failures.get(worker.url, 0),
                "report": router.reports.of(worker)} for worker in router.registry]
    return Response.json({"pairs": pairs, "policy": router.config.policy.policy, "workers": workers,
                          "ready": router.registry.ready(pairs=pairs), "samples": samples})
