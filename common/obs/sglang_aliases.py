"""Aliases of metrics under SGLang's names, so that its dashboards and alerts work unchanged."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from ..api.messages import State

SGLANG_NAMES: Mapping[str, str] = {
    "baton:prompt_tokens": "sglang:prompt_tokens",
    "baton:cached_tokens": "sglang:cached_tokens",
    "baton:generation_tokens": "sglang:generation_tokens",
    "baton:num_requests": "sglang:num_requests",
    "baton:time_to_first_token_seconds": "sglang:time_to_first_token_seconds",
    "baton:inter_token_latency_seconds": "sglang:inter_token_latency_seconds",
    "baton:e2e_request_latency_seconds": "sglang:e2e_request_latency_seconds",
    "baton:prompt_tokens_histogram": "sglang:prompt_tokens_histogram",
    "baton:generation_tokens_histogram": "sglang:generation_tokens_histogram",
    "baton:num_requests_running": "sglang:num_running_reqs",
    "baton:num_requests_waiting": "sglang:num_queue_reqs",
    "baton:hicache_host_used_tokens": "sglang:hicache_host_used_tokens",
    "baton:hicache_host_total_tokens": "sglang:hicache_host_total_tokens",
    "baton:num_used_tokens": "sglang:num_used_tokens",
    "baton:max_total_num_tokens": "sglang:max_total_num_tokens",
    "baton:token_usage": "sglang:token_usage",
    "baton:cache_hit_rate": "sglang:cache_hit_rate",
    "baton:gen_throughput": "sglang:gen_throughput",
    "baton:spec_accept_length": "sglang:spec_accept_length",
    "baton:spec_accept_rate": "sglang:spec_accept_rate",
    "baton:spec_num_steps": "sglang:spec_num_steps",
    "baton:spec_num_draft_tokens": "sglang:spec_num_draft_tokens",
    "baton:spec_verify_calls": "sglang:spec_verify_calls",
}
"""SGLang's name of each family that it has, too."""


class WithSGLangAliases(Collector):
    """Collects the families of ``source``, and those that SGLang has, too, a second time under its names."""

    def __init__(self, source: Collector):
        self._source = source

    def collect(self) -> Iterable[Metric]:
        for family in self._source.collect():
            yield family
            name = SGLANG_NAMES.get(family.name)
            if name is not None:
                alias = Metric(name, family.documentation, family.type)
                for sample in family.samples:
                    alias.samples.append(sample._replace(name=name + sample.name[len(family.name):]))
                yield alias


WINDOW_SECONDS = 10


class Throughput:
    """Tokens generated a second over the last WINDOW_SECONDS, independent of how often it is read."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=WINDOW_SECONDS + 1)

    def note(self, total: float, now: float) -> None:
        """Adds a sample: ``total`` tokens by ``now``, on a monotonic clock in seconds; call it once a second."""
        self._samples.append((total, now))

    @property
    def rate(self) -> float:
        if len(self._samples) < 2:
            return 0.0
        (before, began), (total, now) = self._samples[0], self._samples[-1]
        return (total - before) / (now - began)


def derived_gauges(state: State) -> dict[str, tuple[float, str]]:
    """Gauges that are computed from a state, with their help; the hit rate is over all prompts so far."""
    total = state.total_pages * state.page_size
    prompts = state.counters.get("prompt_tokens", 0.0)
    hits = state.counters.get("cached_tokens", 0.0) / prompts if prompts else 0.0
    used = round(state.gauges.get("token_usage", 0.0) * total)
    return {"max_total_num_tokens": (total, "Capacity of the KV pool in tokens"),
            "num_used_tokens": (used, "Tokens of the KV pool that are in use by running requests"),
            "cache_hit_rate": (hits, "Share of all prompt tokens so far that were found in the prefix cache")}
