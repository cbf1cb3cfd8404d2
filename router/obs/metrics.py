"""The router's metrics, under documented names, at the cost of a dictionary update a request.

prometheus-client's own counters take a lock and walk their buckets in Python (about 5 us for a
request's share). Here the hot path counts into plain dictionaries, and a collector turns them into
prometheus-client's families when ``/metrics`` is read.

All names: docs/metrics.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ...common.obs.process_metrics import register_process
from ..config.admission import REFUSALS
from ..workers.registry import Registry

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

CIRCUIT_STATES = ("closed", "open", "half_open")


class Histogram:
    """Observations counted by bucket."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> int:
        """Count an observation; returns its bucket."""
        bucket = bisect_left(SECONDS, seconds)
        self.counts[bucket] += 1
        self.total += seconds
        return bucket

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus writes them."""
        seen, buckets = 0, []
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self.counts):
            seen += count
            buckets.append((bound, float(seen)))
        return buckets


class AdmissionCounts(Protocol):
    """Requests that admission let in, made wait, and refused (by reason)."""

    refused: dict[str, int]

    @property
    def running(self) -> int: ...
    @property
    def queued(self) -> int: ...


class Metrics:
    """Counters since the start; written by the event loop's thread only."""

    def __init__(self, registry: Registry):
        self._registry = registry
        self.requests: defaultdict[tuple[str, int], int] = defaultdict(int)
        self.durations: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.first_tokens: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.inter_tokens: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.retries: defaultdict[str, int] = defaultdict(int)
        self.decisions: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.circuits_opened: defaultdict[str, int] = defaultdict(int)
        self.worker_failures: defaultdict[str, int] = defaultdict(int)
        self.kv_resyncs = 0
        self.admission: AdmissionCounts | None = None
        self.client_disconnects = 0
        self.broken_streams = 0
        self.continued_streams = 0
        self.poison_requests = 0
        self._exposition = CollectorRegistry(auto_describe=False)
        self._exposition.register(_Families(self))
        register_process(self._exposition, "router")

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self._exposition)

    def families(self) -> Iterator[Metric]:
        yield _counter("requests", "Requests answered.", ("route", "status"), self.requests)
        yield _counter("retries", "Attempts that were repeated before the first byte.", ("reason",), self.retries)
        yield _counter("policy_decisions", "Choices of a worker, by what decided, such as cache_hit.",
                       ("role", "reason"), self.decisions)
        left, broken = {(): self.client_disconnects}, {(): self.broken_streams}
        continued = {(): self.continued_streams}
        yield _counter("continued_streams", "Times that a stream continued on another worker after its own died.", (),
                       continued)
        yield _counter("client_disconnects", "Clients that left before their answer ended.", (), left)
        yield _counter("broken_streams", "Answers that broke after their first byte.", (), broken)
        yield _counter("poison_requests", "Requests refused because workers died while equal ones ran.", (),
                       {(): self.poison_requests})
        yield _counter("kv_resyncs", "Times that a worker was asked for KV events that were missed, or for all.", (),
                       {(): self.kv_resyncs})
        yield _histogram("request_duration_seconds", "From a request's last byte to its answer's.", self.durations)
        yield _histogram("time_to_first_token_seconds", "From a request's last byte to the first of the answer's body.",
                         self.first_tokens)
        yield _histogram("inter_token_seconds", "Mean gap between the events of a stream, one observation a stream.",
                         self.inter_tokens)
        yield from self._workers()
        yield from self._admission()
        yield _counter("worker_failures", "Attempts that their worker failed.", ("worker",),
                       self.worker_failures)
        yield _counter("circuits_opened", "Circuits opened by requests that failed in a row.", ("worker",),
                       self.circuits_opened)

    def _workers(self) -> Iterator[Metric]:
        labels = ("worker", "role")
        load = GaugeMetricFamily("baton_router_worker_inflight_requests", "Requests of this router on a worker.",
                                 labels=labels)
        healthy = GaugeMetricFamily("baton_router_worker_healthy", "1 while the worker passes its health checks.",
                                    labels=labels)
        circuit = GaugeMetricFamily("baton_router_worker_circuit_state", labels=labels, documentation=(
            "0 closed, 1 open (no requests for a while), 2 half-open (one probe at a time)."))
        cached = GaugeMetricFamily("baton_router_worker_cached_tokens", labels=labels, documentation=(
            "Tokens in the prefix cache of a worker whose KV events are followed (cache_exact)."))
        for worker in self._registry:
            if worker.cached_tokens is not None:
                cached.add_metric((worker.url, worker.role), worker.cached_tokens)
            circuit.add_metric((worker.url, worker.role), CIRCUIT_STATES.index(worker.circuit.state))
            load.add_metric((worker.url, worker.role), worker.load)
            healthy.add_metric((worker.url, worker.role), float(worker.state == "healthy"))
        yield load
        yield from self._pairs()
        yield cached
        yield healthy
        yield circuit

    def _admission(self) -> Iterator[Metric]:
        admission = self.admission
        yield _gauge("running_requests", "Requests that were let in and have not ended.",
                     admission.running if admission else 0)
        yield _gauge("queued_requests", "Requests that wait to be let in.", admission.queued if admission else 0)
        yield _counter("refused_requests", "Requests not let in.", ("reason",),
                       admission.refused if admission else dict.fromkeys(REFUSALS, 0))

    def _pairs(self) -> Iterator[Metric]:
        yield _gauge("pairs", "Pairs of a prefill and a decode worker that take requests and fit together.",
                     self._registry.pairs().count)
        misfits = GaugeMetricFamily(
            "baton_router_worker_incompatible_peers", labels=("worker", "role"),
            documentation="Kinds of workers of the other role that a worker is incompatible with.")
        for worker in self._registry:
            if worker.facts.transfers_kv:
                misfits.add_metric((worker.url, worker.role), len(worker.misfits))
        yield misfits


class _Families(Collector):
    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.families()


def _counter(name: str, text: str, labels: tuple[str, ...], counts: Mapping[Any, float]) -> Metric:
    family = CounterMetricFamily(f"baton_router_{name}", text, labels=labels)
    for key, count in counts.items():
        values = key if isinstance(key, tuple) else (key,)
        family.add_metric([str(value) for value in values], count)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(f"baton_router_{name}", text)
    family.add_metric((), value)
    return family


def _histogram(name: str, text: str, histograms: dict[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(f"baton_router_{name}", text, labels=("route",))
    for route, histogram in histograms.items():
        family.add_metric((route,), histogram.buckets(), histogram.total)
    return family
