"""Prometheus metrics of one server, named as SGLang's with a ``baton:`` prefix."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..api.errors import ERROR_CODES
from ..api.merged_states import merge_states
from ..api.messages import State
from ..config.roles import ROLES, Role
from .buckets import Buckets
from .counts import Counts, SummedCounts, counts_of
from .engine_metrics import COUNTED_BY_API_SERVER, COUNTERS, GAUGES, about, family_of
from .process_metrics import register_process
from .sglang_aliases import WINDOW_SECONDS, Throughput, WithSGLangAliases, derived_gauges

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LOOP_LAG_BUCKETS = (.002, .004, .008, .015, .03, .06, .12, .25, .5, 1, 2, 5)

MAX_LABEL_SETS = 1000
MAX_LABEL_CHARACTERS = 128
OTHER_LABELS = "other"
"""Clients choose the values of custom labels, and each set of them costs 50 KB."""
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

    def __init__(self, labels: dict[str, str], role: Role, *, speculates: bool, tiered: bool = False,
                 by_rank: bool = False):
        """``by_rank``: each data-parallel rank by itself, with its label, instead of their sum."""
        self._labels = labels
        self._by_rank = by_rank
        self._names = [name for name, metric in COUNTERS.items()
                       if metric.exported_by(role) and (speculates or not metric.speculative)
                       and (tiered or not metric.tiered)]
        self.states: Sequence[State] = ()
        self.throughput = Throughput()

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for state in self.states if self._by_rank or not self.states else [merge_states(self.states)]:
            labels = {**self._labels, **({"dp_rank": str(state.dp_rank)} if self._by_rank else {})}
            for family in (*self._gauges(state, labels), *self._counters(state.counters, labels)):
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        if not self.states:
            families = {family.name: family for family in self._counters({}, self._labels)}
        else:
            throughput = GaugeMetricFamily("baton:gen_throughput", f"Tokens generated a second, over the last "
                                           f"{WINDOW_SECONDS} s", labels=[*self._labels])
            throughput.add_metric([*self._labels.values()], self.throughput.rate)
            families[throughput.name] = throughput
        yield from families.values()

    def _gauges(self, state: State, labels: dict[str, str]) -> Iterator[Metric]:
        gauges = {name: (getattr(state, field), help) for name, (field, help) in _STATE_GAUGES.items()}
        gauges.update({name: (value, about(GAUGES, name).help) for name, value in state.gauges.items()})
        gauges.update(derived_gauges(state))
        for name, (value, help) in gauges.items():
            gauge = GaugeMetricFamily(f"baton:{name}", help, labels=[*labels])
            gauge.add_metric([*labels.values()], value)
            yield gauge

    def _counters(self, counts: Mapping[str, float], own_labels: dict[str, str]) -> Iterator[Metric]:
        values = {(name, value): 0.0 for name in self._names for value in COUNTERS[name].values or (None,)}
        values.update({family_of(name): count for name, count in counts.items() if name not in COUNTED_BY_API_SERVER})
        families: dict[str, CounterMetricFamily] = {}
        for (name, value), count in values.items():
            metric = about(COUNTERS, name)
            labels = [*own_labels, *([metric.label] if metric.label else [])]
            family = families.setdefault(name, CounterMetricFamily(f"baton:engine_{name}", metric.help, labels=labels))
            family.add_metric([*own_labels.values(), *([value] if value is not None else [])], count)
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
                 simulated: bool = False, tiered: bool = False, buckets: Buckets | None = None, by_rank: bool = False,
                 custom_labels: tuple[str, ...] = (), extra_labels: Mapping[str, str] | None = None,
                 role: Role | None = None):
        """``role``: the facts of all roles that the server may take, by default those of ``mode``.
        ``sglang_names``: export metrics that SGLang has, too, a second time under its names. ``speculates``: the
        server drafts; ``simulated``: its acceptance is drawn, which all metrics say by a label. ``tiered``: it has KV
        tiers. ``by_rank``: export the engine's metrics of each data-parallel rank. ``custom_labels``: names of further
        labels of requests' metrics, ``extra_labels`` further labels of all."""
        buckets = buckets or Buckets()
        labels = {"model_name": model_name, "mode": mode, **({"simulated": "true"} if simulated else {}),
                  **(extra_labels or {})}
        self.registry = CollectorRegistry()
        self.engine = EngineCollector(labels, role or ROLES.get(mode), speculates=speculates, tiered=tiered,
                                      by_rank=by_rank)
        self.registry.register(self.engine)
        names = [*labels, *custom_labels]

        def counter(name: str, help: str, *more: str) -> Counter:
            return Counter(f"baton:{name}", help, [*names, *more], registry=self.registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"baton:{name}", help, names, registry=self.registry, buckets=buckets)

        self._token_counters = (
            counter("prompt_tokens", "Prompt tokens of requests that produced output"),
            counter("cached_tokens", "Of the prompt tokens those found in this server's prefix cache"),
            counter("generation_tokens", "Tokens generated; a prefill server counts the first token of each request"))
        self._latencies = (
            histogram("time_to_first_token_seconds", "From arrival to the first token; on a decode server with prefill "
                      "and transfer", buckets.ttft),
            histogram("inter_token_latency_seconds", "Between tokens of one request", buckets.itl),
            histogram("e2e_request_latency_seconds", "From arrival to the end", buckets.e2e))
        self._size_histograms = [histogram(name, help, bounds) for name, help, bounds in (
            ("prompt_tokens_histogram", "Prompt tokens of the requests that ended", buckets.prompt_tokens),
            ("generation_tokens_histogram", "Generated tokens of the requests that ended", buckets.generation_tokens),
        ) if bounds]
        self.event_loop_lag = Histogram(
            "baton:event_loop_lag_seconds", "Lag of the API server's event loop, ten times a second: all streams wait "
            "for it", [*labels], registry=self.registry, buckets=_LOOP_LAG_BUCKETS).labels(**labels)
        self._outcomes = counter("num_requests", "Requests by outcome: a finish reason, an error code, or "
                                 "'disconnected'", "outcome")
        self._objectives = counter("slo_requests", "Requests that ended, by objective (ttft, tpot) that they had and "
                                   "whether it was met or missed", "objective", "outcome")
        self._verify_calls = None if not speculates else counter(
            "spec_verify_calls", "Decode steps of the requests that ended, with drafts or without")
        self._custom_labels = custom_labels
        self._server_labels = labels
        self._by_labels: dict[tuple[str, ...], ServerMetrics] = {}
        self._bind({**labels, **dict.fromkeys(custom_labels, "")})
        for outcome in (*FINISH_REASONS, *ERROR_CODES, "disconnected"):
            self._outcomes.labels(**self._labels, outcome=outcome)
        self.others = SummedCounts()
        """Metrics that other processes of this server counted, which this one exports too."""
        summed = _Summed(self.registry, self.others)
        self._exposed = CollectorRegistry(auto_describe=False)
        self._exposed.register(WithSGLangAliases(summed) if sglang_names else summed)
        register_process(self._exposed, mode)

    def _bind(self, labels: dict[str, str]) -> None:
        """Counts requests with these labels from now on."""
        self._labels = labels
        self.prompt_tokens, self.cached_tokens, self.generation_tokens = (
            family.labels(**labels) for family in self._token_counters)
        self.ttft, self.itl, self.e2e = (family.labels(**labels) for family in self._latencies)
        self._sizes = [family.labels(**labels) for family in self._size_histograms]
        self.spec_verify_calls = None if self._verify_calls is None else self._verify_calls.labels(**labels)
        self._by_outcome: dict[str, Counter] = {}  # a lookup by labels takes as long as the rest of a token's work

    def labelled(self, given: Mapping[str, str]) -> ServerMetrics:
        """These metrics, counting requests with the ``given`` values of the custom labels. A server has
        MAX_LABEL_SETS of them at most; further ones are counted as OTHER_LABELS."""
        values = tuple(given.get(name, "")[:MAX_LABEL_CHARACTERS] for name in self._custom_labels)
        if not any(values):
            return self
        if values not in self._by_labels and len(self._by_labels) >= MAX_LABEL_SETS:
            values = (OTHER_LABELS,) * len(values)
        found = self._by_labels.get(values)
        if found is None:
            found = self._by_labels[values] = copy.copy(self)
            found._bind({**self._server_labels, **dict(zip(self._custom_labels, values))})
        return found

    @property
    def tokens(self) -> TokenTotals:
        """The totals so far, of all processes. Reading them takes 20 us: meant for once in a few seconds."""
        return TokenTotals(*(
            sum(sample.value for sample in family.samples if sample.name.endswith("_total"))
            + self.others.total(family.name) for counter in self._token_counters for family in counter.collect()))

    def counts(self) -> Counts:
        """Returns what this process counted, without the engine's counters."""
        return counts_of(metric for metric in self.registry.collect() if not metric.name.startswith("baton:engine_"))

    def observe_end(self, seconds: float, prompt_tokens: int, generated_tokens: int) -> None:
        """Observes a request that ended ``seconds`` after its arrival."""
        self.e2e.observe(seconds)
        for histogram, count in zip(self._sizes, (prompt_tokens, generated_tokens)):
            histogram.observe(count)

    def count_outcome(self, outcome: str) -> None:
        """Counts one request that ended as ``stop``, ``length``, an error's code, or ``disconnected``."""
        counter = self._by_outcome.get(outcome)
        if counter is None:
            counter = self._by_outcome[outcome] = self._outcomes.labels(**self._labels, outcome=outcome)
        counter.inc()

    def count_objective(self, objective: str, met: bool) -> None:
        """Counts a request that ended and had an objective, ``ttft`` or ``tpot``."""
        self._objectives.labels(**self._labels, objective=objective, outcome="met" if met else "missed").inc()

    def note_throughput(self) -> None:
        """Samples the generated tokens for the throughput gauge; call it once a second."""
        self.engine.throughput.note(self.tokens.generated, time.monotonic())

    def render(self, states: State | Sequence[State] | None) -> bytes:
        """The text exposition; ``states``: a new snapshot of the engine, or of each of its data-parallel ranks; None
        while it has none."""
        self.engine.states = [states] if isinstance(states, State) else list(states or ())
        return generate_latest(self._exposed)
