"""The figures of a run: latencies, throughput, goodput, utilisation, cache hits, transfers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...common.bench.report.goodput import Slo
from ...common.bench.report.spread import Spread
from .records import Gaps, Outcome, Run, ServerUsage


@dataclass(frozen=True)
class Figures:
    """Figures over the requests that were answered; spreads in milliseconds. ``seconds``: from the first request to the
    last answer. ``good``: requests within the SLO, None without one. ``normalized_p90``: the 90th percentile of
    end-to-end milliseconds an output token, whose inverse is InferenceX's interactivity."""

    cluster: str
    gpus: int
    requests: int
    failed: dict[str, int]
    seconds: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    retractions: int
    good: int | None
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    normalized_p90: float
    servers: list[ServerUsage]
    transfer_bytes: int
    link_busy: float
    cpu_seconds: float

    @property
    def completed(self) -> int:
        return self.requests - sum(self.failed.values())

    def rate(self, count: float) -> float:
        """``count`` per second."""
        return count / self.seconds if self.seconds > 0 else math.nan

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that a prefix cache had."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0

    @property
    def attainment(self) -> float | None:
        """Share of all requests within the SLO."""
        return None if self.good is None else self.good / self.requests

    @property
    def speed(self) -> float:
        """Simulated seconds a second of CPU time."""
        return self.seconds / self.cpu_seconds if self.cpu_seconds > 0 else math.inf

    def utilisation(self, server: ServerUsage) -> float:
        """Share of the time in which a server's device computed."""
        return self.rate(server.prefill_seconds + server.decode_seconds)

    def keyed(self) -> dict[str, Any]:
        """The keys of ``bench_serving``, then the simulator's own."""
        return {
            "duration": self.seconds, "completed": self.completed, "total_input_tokens": self.input_tokens,
            "total_output_tokens": self.output_tokens, "request_throughput": self.rate(self.completed),
            "input_throughput": self.rate(self.input_tokens), "output_throughput": self.rate(self.output_tokens),
            **self.e2e.keyed("e2e_latency_ms"), **self.ttft.keyed("ttft_ms"), **self.tpot.keyed("tpot_ms"),
            **self.itl.keyed("itl_ms"), "failed": self.failed, "total_cached_tokens": self.cached_tokens,
            "cache_hit_rate": self.hit_rate, "request_goodput": None if self.good is None else self.rate(self.good),
            "slo_attainment": self.attainment, "p90_e2e_ms_per_output_token": self.normalized_p90,
            "cluster": self.cluster, "gpus": self.gpus, "retractions": self.retractions,
            "output_throughput_per_gpu": self.rate(self.output_tokens) / self.gpus,
            "transfer_bytes": self.transfer_bytes, "busiest_link": self.link_busy,
            "servers": [asdict(server) | {"utilisation": self.utilisation(server), "mean_batch": server.mean_batch}
                        for server in self.servers],
            "cpu_seconds": self.cpu_seconds, "speed": self.speed,
        }


def figures(run: Run, slo: Slo | None = None) -> Figures:
    done = [outcome for outcome in run.outcomes if not outcome.error]
    begin = min((outcome.sent for outcome in run.outcomes), default=0.0)
    last = max((outcome.last for outcome in run.outcomes), default=0.0)
    normalized = [outcome.e2e * 1e3 / outcome.num_tokens for outcome in done]
    seconds = last - begin
    return Figures(
        cluster=run.cluster, gpus=run.gpus, requests=len(run.outcomes),
        failed=dict(Counter(outcome.error for outcome in run.outcomes if outcome.error).most_common()),
        seconds=seconds, input_tokens=sum(outcome.request.input_len for outcome in done),
        output_tokens=sum(outcome.num_tokens for outcome in done),
        cached_tokens=sum(outcome.cached for outcome in done),
        retractions=sum(server.retracted for server in run.servers),
        good=None if slo is None else sum(is_good(outcome, slo) for outcome in run.outcomes),
        ttft=_ms([outcome.ttft for outcome in done]), e2e=_ms([outcome.e2e for outcome in done]),
        tpot=_ms([outcome.tpot for outcome in done if outcome.tpot is not None]), itl=weighted(run.gaps),
        normalized_p90=float(np.percentile(normalized, 90)) if normalized else math.nan, servers=run.servers,
        transfer_bytes=sum(run.bytes_sent.values()),
        link_busy=max(run.link_seconds.values(), default=0.0) / seconds if seconds > 0 else 0.0,
        cpu_seconds=run.cpu_seconds)


def is_good(outcome: Outcome, slo: Slo) -> bool:
    """True where a request was answered within all limits; an answer of one token has no TPOT to miss."""
    if outcome.error:
        return False
    seconds = {"ttft": outcome.ttft, "tpot": outcome.tpot or 0.0, "e2e": outcome.e2e}
    return all(seconds[name] * 1e3 <= limit for name, limit in slo.limits.items())


def _ms(seconds: Sequence[float]) -> Spread:
    return Spread.of([value * 1e3 for value in seconds])


def weighted(gaps: Gaps) -> Spread:
    """The spread in milliseconds of values that occurred several times."""
    values, counts = gaps.arrays()
    if not len(values):
        return Spread.of([])
    order = np.argsort(values)
    values, counts = values[order] * 1e3, counts[order]
    reached = np.cumsum(counts)
    total = float(reached[-1])
    mean = float((values * counts).sum() / total)
    deviation = math.sqrt(max(0.0, float((values**2 * counts).sum() / total) - mean**2))
    p50, p90, p95, p99 = (float(values[min(int(np.searchsorted(reached, total * share)), len(values) - 1)])
                          for share in (0.5, 0.9, 0.95, 0.99))
    return Spread(round(total), mean, deviation, p50, p90, p95, p99, float(values[-1]))
