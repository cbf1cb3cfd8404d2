"""Prometheus metrics of one server, named as SGLang's with a ``baton:`` prefix."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api.errors import ERROR_CODES
from ..api.messages import State
from ..config.roles import ROLES, Role
from .buckets import Buckets
from .counts import Counts, SummedCounts, counts_of
from .engine_metrics import COUNTED_BY_API_SERVER, COUNTERS, GAUGES, about, family_of
from .process_metrics import register_process
from .sglang_aliases import WINDOW_SECONDS, Throughput, WithSGLangAliases, derived_gauges

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LOOP_LAG_BUCKETS = (.002, .004, .008, .015, .03, .06, .12, .25, .5, 1, 2, 5)

FINISH_REASONS = ("stop", "length", "abort")
_STATE_GAUGES = {
    "num_requests_running": ("num_running", "Requests that the engine computes"),
    "num_requests_waiting": ("num_waiting", "Requests that wait in the queue"),
    "num_requests_transferring": ("num_transferring", "Requests whose KV cache is transferred between servers"),
    "kv_pool_pages": ("total_pages", "Pages of the KV pool: the free, allocated and cached ones together"),
    "kv_pages_free": ("free_pages", "Free KV pages"),
    "kv_pages_allocated": ("held_pages", "KV pages allocated to requests"),
    "kv_pages_cached": ("cached_pages", "KV pages of the prefix cache that no request uses"),
}


class EngineCollector(Collector):
    """Exports the latest ``State`` of the engine; before the first one, its counters at 0."""

    def __init__(self, labels: dict[str, str], role: Role, *, speculates: bool):
        self._labels = labels
        self._names = [name for name, metric in COUNTERS.items()
                       if metric.exported_by(role) and (speculates or not metric.speculative)]
        self.state: State | None = None
        self.throughput = Throughput()

    def collect(self) -> Iterable[Metric]:
        if self.state is not None:
            yield from self._gauges(self.state)
        yield from self._counters(self.state.counters if self.state is not None else {})

    def _gauges(self, state: State) -> Iterator[Metric]:
        gauges = {name: (getattr(state, field), help) for name, (field, help) in _STATE_GAUGES.items()}
        gauges.update({name: (value, about(GAUGES, name).help) for name, value in state.gauges.items()})
        gauges.update(derived_gauges(state))
        gauges["gen_throughput"] = (self.throughput.rate,
                                    f"Tokens generated a second, over the last {WINDOW_SECONDS} s")
        for name, (value, help) in gauges.items():
            gauge = GaugeMetricFamily(f"baton:{name}", help, labels=[*self._labels])
            gauge.add_metric([*self._labels.values()], value)
            yield gauge

    def _counters(self, counts: Mapping[str, float]) -> Iterator[Metric]:
        values = {(name, value): 0.0 for name in self._names for value in COUNTERS[name].values or (None,)}
        values.update({family_of(name): count for name, count in counts.items() if name not in COUNTED_BY_API_SERVER})
        families: dict[str, CounterMetricFamily] = {}
        for (name, value), count in values.items():
            metric = about(COUNTERS, name)
            labels = [*self._labels, *([metric.label] if metric.label else [])]
            family = families.setdefault(name, CounterMetricFamily(f"baton:engine_{name}", metric.help, labels=labels))
            family.add_metric([*self._labels.values(), *([value] if value is not None else [])], count)
        yield from families.values()


class _Summed(Collector):
    """Collects the metrics of a registry with the counts of other processes added."""

    def __init__(self, registry: CollectorRegistry, others: SummedCounts):
        self._registry = registry
        self._others = others

    def collect(self) -> Iterable[Metric]:
        return self._others.add_to(self._registry.collect())


class TokenTotals(NamedTuple):
    """Tokens of a server's requests since it started."""

    prompt: float
    cached: float
    generated: float


class ServerMetrics:
    """Counters and histograms of one server; each server has its own registry, so that several fit one process."""

    def __init__(self, model_name: str, mode: str, *, sglang_names: bool = True, speculates: bool = False,
                 simulated: bool = False, buckets: Buckets | None = None):
        """``sglang_names``: export metrics that SGLang has, too, a second time under its names. ``speculates``: the
        server drafts; ``simulated``: its acceptance is drawn, which all metrics say by a label."""
        buckets = buckets or Buckets()
        labels = {"model_name": model_name, "mode": mode, **({"simulated": "true"} if simulated else {})}
        self.registry = CollectorRegistry()
        self.engine = EngineCollector(labels, ROLES.get(mode), speculates=speculates)
        self.registry.register(self.engine)

        def counter(name: str, help: str) -> Counter:
            return Counter(f"baton:{name}", help, list(labels), registry=self.registry).labels(**labels)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(f"baton:{name}", help, list(labels), registry=self.registry, buckets=buckets)
            return family.labels(**labels)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that produced output")
        self.cached_tokens = counter("cached_tokens", "Of the prompt tokens those found in this server's prefix cache")
        self.generation_tokens = counter("generation_tokens", "Tokens generated; a prefill server counts the first "
                                         "token of each request")
        self.ttft = histogram("time_to_first_token_seconds", "From arrival to the first token; on a decode server "
                              "with prefill and transfer", buckets.ttft)
        self.itl = histogram("inter_token_latency_seconds", "Between tokens of one request", buckets.itl)
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the end", buckets.e2e)
        self._prompt_sizes = None if not buckets.prompt_tokens else histogram(
            "prompt_tokens_histogram", "Prompt tokens of the requests that ended", buckets.prompt_tokens)
        self._generation_sizes = None if not buckets.generation_tokens else histogram(
            "generation_tokens_histogram", "Generated tokens of the requests that ended", buckets.generation_tokens)
        self.event_loop_lag = histogram("event_loop_lag_seconds", "Lag of the API server's event loop, ten times a "
                                        "second: all streams wait for it", _LOOP_LAG_BUCKETS)
        self._requests = Counter("baton:num_requests", "Requests by outcome: a finish reason, an error code, or "
                                 "'disconnected'", [*labels, "outcome"], registry=self.registry)
        self.spec_verify_calls = None if not speculates else counter(
            "spec_verify_calls", "Decode steps of the requests that ended, with drafts or without")
        self._labels = labels
        for outcome in (*FINISH_REASONS, *ERROR_CODES, "disconnected"):
            self._requests.labels(**labels, outcome=outcome)
        self._by_outcome: dict[str, Counter] = {}  # a lookup by labels takes as long as the rest of a token's work
        self.others = SummedCounts()
        """Metrics that other processes of this server counted, which this one exports too."""
        summed = _Summed(self.registry, self.others)
        self._exposed = CollectorRegistry(auto_describe=False)
        self._exposed.register(WithSGLangAliases(summed) if sglang_names else summed)
        register_process(self._exposed, mode)

    @property
    def tokens(self) -> TokenTotals:
        """The totals so far, of all processes. Reading them takes 20 us: meant for once in a few seconds."""
        counters = (self.prompt_tokens, self.cached_tokens, self.generation_tokens)
        return TokenTotals(*(family.samples[0].value + self.others.total(family.name)
                             for counter in counters for family in counter.collect()))

    def counts(self) -> Counts:
        """Returns what this process counted, without the engine's counters."""
        return counts_of(metric for metric in self.registry.collect() if not metric.name.startswith("baton:engine_"))

    def observe_end(self, seconds: float, prompt_tokens: int, generated_tokens: int) -> None:
        """Observes a request that ended ``seconds`` after its arrival."""
        self.e2e.observe(seconds)
        if self._prompt_sizes is not None and self._generation_sizes is not None:
            self._prompt_sizes.observe(prompt_tokens)
            self._generation_sizes.observe(generated_tokens)

    def count_outcome(self, outcome: str) -> None:
        """Counts one request that ended as ``stop``, ``length``, an error's code, or ``disconnected``."""
        counter = self._by_outcome.get(outcome)
        if counter is None:
            counter = self._by_outcome[outcome] = self._requests.labels(**self._labels, outcome=outcome)
        counter.inc()

    def note_throughput(self) -> None:
        """Samples the generated tokens for the throughput gauge; call it once a second."""
        self.engine.throughput.note(self.tokens.generated, time.monotonic())

    def render(self, state: State | None) -> bytes:
        """The text exposition; ``state`` is a new snapshot of the engine, None while it has none."""
        self.engine.state = state
        return generate_latest(self._exposed)
