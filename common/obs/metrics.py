"""Prometheus metrics of one server, named as SGLang's with a ``baton:`` prefix."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api.messages import State
from .twins import Throughput, WithTwins, derived_gauges

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS = (.005, .01, .025, .05, .1, .2, .4, .8, 1.5, 3, 6, 12, 25, 50, 100, 200)
_ITL_BUCKETS = (.001, .002, .004, .006, .008, .01, .015, .02, .03, .04, .06, .08, .1, .2, .4, .8, 1.5, 3)
_LATE_BUCKETS = (.002, .004, .008, .015, .03, .06, .12, .25, .5, 1, 2, 5)
_E2E_BUCKETS = (.01, .05, .1, .25, .5, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 960, 1920)

_GAUGES = {
    "num_requests_running": ("num_running", "Requests that the engine computes"),
    "num_requests_waiting": ("num_waiting", "Requests that wait for memory or their turn"),
    "num_requests_transferring": ("num_transferring", "Requests whose KV cache is on its way between two servers"),
    "kv_pages_total": ("total_pages", "Pages of the KV pool"),
    "kv_pages_free": ("free_pages", "KV pages that hold nothing"),
    "kv_pages_held": ("held_pages", "KV pages held by requests"),
    "kv_pages_cached": ("cached_pages", "KV pages held by the prefix cache alone"),
}
# The engine's counters have the error's code, or what broke, behind these names; here it is a label.
_LABELLED = {"kv_transfers_failed": ("code", "KV transfers that failed, by the error's code"),
             "kv_transfers_broken": ("cause", "KV transfers that broke, by what did")}
# The front counts these itself, at the moment a request ends; the engine's own counts would double them.
_COUNTED_IN_FRONT = frozenset(("prompt_tokens", "generation_tokens", "cached_tokens"))


class EngineCollector(Collector):
    """Exports the latest ``State`` of the engine."""

    def __init__(self, labels: dict[str, str]):
        self._names = list(labels)
        self._values = list(labels.values())
        self.state: State | None = None
        self._throughput = Throughput()

    def collect(self) -> Iterable[Metric]:
        state = self.state
        if state is None:
            return
        gauges = {name: (getattr(state, field), help) for name, (field, help) in _GAUGES.items()}
        derived = derived_gauges(state)
        generated = state.counters.get("generation_tokens", 0.0)
        derived["gen_throughput"] = self._throughput.rate(generated, time.monotonic())
        gauges.update({name: (value, "Reported by the engine") for name, value in (state.gauges | derived).items()})
        for name, (value, help) in gauges.items():
            gauge = GaugeMetricFamily(f"baton:{name}", help, labels=self._names)
            gauge.add_metric(self._values, value)
            yield gauge
        labelled = {prefix: CounterMetricFamily(f"baton:engine_{prefix}", help, labels=[*self._names, label])
                    for prefix, (label, help) in _LABELLED.items()}
        for name, value in state.counters.items():
            prefix = next((prefix for prefix in labelled if name.startswith(f"{prefix}_")), None)
            if prefix is not None:
                labelled[prefix].add_metric([*self._values, name[len(prefix) + 1:]], value)
            elif name not in _COUNTED_IN_FRONT:
                counter = CounterMetricFamily(f"baton:engine_{name}", "Counted by the engine", labels=self._names)
                counter.add_metric(self._values, value)
                yield counter
        yield from (family for family in labelled.values() if family.samples)


class TokenTotals(NamedTuple):
    """Tokens of a server's requests since it started."""

    prompt: float
    cached: float
    generated: float


class ServerMetrics:
    """Counters and histograms of one server; each server has its own registry, so that several fit one process."""

    def __init__(self, model_name: str, mode: str):
        labels = {"model_name": model_name, "mode": mode}
        self.registry = CollectorRegistry()
        self.engine = EngineCollector(labels)
        self.registry.register(self.engine)

        def counter(name: str, help: str) -> Counter:
            return Counter(f"baton:{name}", help, list(labels), registry=self.registry).labels(**labels)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"baton:{name}", help, list(labels), registry=self.registry, buckets=buckets)
            return family.labels(**labels)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that produced output")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in the prefix cache")
        self.generation_tokens = counter("generation_tokens", "Tokens generated")
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token", _TTFT_BUCKETS)
        self.itl = histogram("inter_token_latency_seconds", "Between tokens of one request", _ITL_BUCKETS)
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the end", _E2E_BUCKETS)
        self.late = histogram("front_lateness_seconds", "How late the front's event loop is: all streams wait for it, "
                              "beside the engine", _LATE_BUCKETS)
        self._requests = Counter("baton:num_requests", "Requests by outcome: a finish reason, an error code, or "
                                 "'disconnected'", [*labels, "outcome"], registry=self.registry)
        self._labels = labels
        self._by_outcome: dict[str, Counter] = {}  # a lookup by labels takes as long as a token does otherwise
        self._exposed = CollectorRegistry()
        self._exposed.register(WithTwins(self.registry))  # type: ignore[arg-type]

    @property
    def tokens(self) -> TokenTotals:
        """Read as a scrape reads them, which takes 20 us: meant for once in a few seconds."""
        counters = (self.prompt_tokens, self.cached_tokens, self.generation_tokens)
        return TokenTotals(*(family.samples[0].value for counter in counters for family in counter.collect()))

    def ended(self, outcome: str) -> None:
        """Count one request that ended as ``stop``, ``length``, an error's code, or ``disconnected``."""
        counter = self._by_outcome.get(outcome)
        if counter is None:
            counter = self._by_outcome[outcome] = self._requests.labels(**self._labels, outcome=outcome)
        counter.inc()

    def render(self, state: State | None) -> bytes:
        """The text exposition; ``state`` is a fresh snapshot of the engine, None while it has none."""
        self.engine.state = state
        return generate_latest(self._exposed)
