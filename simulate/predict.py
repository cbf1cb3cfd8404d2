"""Closed forms: what a cluster's latencies and utilisation would be, in microseconds and without torch or numpy.

Prefill servers are a queue with several servers, whose wait is Allen and Cunneen's approximation: Kingman's formula for
one server, (ca^2 + cs^2) / 2 times the wait of exponential times, extended to several by Erlang's C. Decode servers
hold as many requests as arrive while one is answered (Little's law), which is a fixed point, because steps take longer
with more requests. It is a check of the simulator, and it prunes what the planner simulates. It knows no caches, no
retractions and no policies, and is for steady loads: a queue that grows without bound is reported as such.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from .costs.model import Costs
from .workload.request import SimRequest, rate_of

_ITERATIONS = 60
_P99 = 2.326  # of a normal distribution


@dataclass(frozen=True)
class Traffic:
    """Requests ``rate`` a second with mean lengths in tokens, and coefficients of variation of lengths and of the
    times between arrivals. ``cached``: the share of prompts that a prefix cache has."""

    rate: float
    input_len: float
    output_len: float
    input_cv: float = 0.0
    output_cv: float = 0.0
    arrival_cv: float = 1.0
    cached: float = 0.0

    @classmethod
    def of(cls, requests: Sequence[SimRequest], cached: float = 0.0) -> Traffic:
        """The traffic of a workload (two requests or more)."""
        inputs, outputs = [each.input_len for each in requests], [each.output_len for each in requests]
        gaps = [after.at - before.at for before, after in zip(requests, requests[1:])]
        return cls(rate_of(requests), _mean(inputs), _mean(outputs), _cv(inputs), _cv(outputs), _cv(gaps), cached)

    def at(self, rate: float) -> Traffic:
        return replace(self, rate=rate)


@dataclass(frozen=True)
class Prediction:
    """Milliseconds and shares. ``stable``: neither the queue of prompts nor the decode batches grow without bound; else
    latencies are infinite. ``batch``: requests that decode together on a server. ``kv_usage``: share of its KV cache
    that they take."""

    ttft_mean: float
    ttft_p99: float
    tpot_mean: float
    tpot_p99: float
    e2e_mean: float
    prefill_usage: float
    decode_usage: float
    batch: float
    kv_usage: float
    stable: bool


def predict(costs: Costs, traffic: Traffic, *, unified: int = 0, prefill: int = 0, decode: int = 0,
            prefill_costs: Costs | None = None, max_running_requests: int = 256, chunk: int = 8192,
            pool_tokens: int | None = None) -> Prediction:
    """Predicts the steady state of ``unified`` servers, or of ``prefill`` and ``decode`` ones."""
    pair = not unified
    sender = (prefill_costs or costs) if pair else costs
    servers, decoders = (prefill, decode) if pair else (unified, unified)
    service, service_cv = _service(sender, traffic, chunk)
    usage = traffic.rate * service / 1e3 / servers
    share = 0.0 if pair else usage
    batch, step = _decode_state(costs, traffic, decoders, share)
    context = traffic.input_len + _mean_position(traffic)
    kv_usage = batch * context / (pool_tokens or costs.kv_tokens)
    # The fixed point of a unified server also diverges where prompts leave decode too little time.
    stable = usage < 1 and math.isfinite(step) and batch <= max_running_requests and kv_usage < 1
    if not stable:
        return Prediction(*(math.inf,) * 5, usage, 1.0, batch, kv_usage, False)
    wait_mean, wait_p99 = _wait(service, usage, servers, (traffic.arrival_cv**2 + service_cv**2) / 2)
    decoding = min(1.0, batch)  # the share of the time in which a server decodes
    outside = _outside(sender, costs, traffic, pair)
    # A prompt waits for the rest of a step, on a unified server also for the step that was launched after it.
    behind = decoding * step * (0.5 if pair else 1.5)
    ttft = outside + service + wait_mean + behind
    own_p99 = service * (_lognormal_p99(service_cv) - 1)
    ttft_p99 = outside + service + behind + math.hypot(own_p99, wait_p99)
    tpot = step / (1 - share)
    crowded = costs.steps.decode(batch + 0.5 * _P99 * math.sqrt(batch), (batch + 0.5 * _P99 * math.sqrt(batch))
                                 * context) / (1 - share)
    spread = 0.0 if pair else _P99 * share * service / math.sqrt(max(1.0, traffic.output_len))
    return Prediction(ttft, ttft_p99, tpot, crowded + spread, ttft + tpot * (traffic.output_len - 1), usage,
                      min(1.0, batch) * (1 - share) + share, batch, kv_usage, True)


@dataclass(frozen=True)
class Size:
    """Numbers of servers, with their prediction."""

    prefill: int
    decode: int
    predicted: Prediction


def smallest_pair(costs: Costs, traffic: Traffic, *, ttft_ms: float | None = None, tpot_ms: float | None = None,
                  max_gpus: int = 64, most_usage: float = 0.85, prefill_costs: Costs | None = None,
                  max_running_requests: int = 256) -> Size | None:
    """The prefill and decode servers of the fewest GPUs whose predicted 99th percentiles are within the limits, with
    ``most_usage`` of prefill servers and KV caches at most; of equal ones that with the lowest TTFT. None where
    ``max_gpus`` do not suffice. Takes milliseconds, so that a planner may ask at every decision."""
    sender = prefill_costs or costs
    for gpus in range(sender.gpus + costs.gpus, max_gpus + 1):
        found = []
        for prefill in range(1, (gpus - costs.gpus) // sender.gpus + 1):
            decode, rest = divmod(gpus - prefill * sender.gpus, costs.gpus)
            if rest:
                continue
            predicted = predict(costs, traffic, prefill=prefill, decode=decode, prefill_costs=prefill_costs,
                                max_running_requests=max_running_requests)
            if (predicted.stable and max(predicted.prefill_usage, predicted.kv_usage) <= most_usage
                    and predicted.ttft_p99 <= (ttft_ms or math.inf) and predicted.tpot_p99 <= (tpot_ms or math.inf)):
                found.append(Size(prefill, decode, predicted))
        if found:
            return min(found, key=lambda size: size.predicted.ttft_p99)
    return None


def _service(costs: Costs, traffic: Traffic, chunk: int) -> tuple[float, float]:
    """Mean and coefficient of variation of a prompt's time on a prefill server."""
    steps = costs.steps
    computed = traffic.input_len * (1 - traffic.cached)
    second = computed**2 * (1 + traffic.input_cv**2)
    linear = steps.prefill_token * computed
    quadratic = steps.prefill_context * (second / 2 + second * traffic.cached / max(1e-9, 1 - traffic.cached))
    fixed = steps.prefill_step * max(1.0, computed / chunk)
    mean = max(steps.host_prefill, fixed + linear + quadratic)
    # The deviation of the linear part and of the quadratic one, which varies twice as much.
    return mean, traffic.input_cv * (linear + 2 * quadratic) / mean


def _mean_position(traffic: Traffic) -> float:
    """The mean of the tokens that a decoding request has generated so far."""
    return traffic.output_len * (1 + traffic.output_cv**2) / 2


def _decode_state(costs: Costs, traffic: Traffic, servers: int, share: float) -> tuple[float, float]:
    """The mean batch of a server and the milliseconds of its steps, with ``share`` of its time taken by prompts."""
    context = traffic.input_len + _mean_position(traffic)
    tokens = traffic.rate / servers * (traffic.output_len - 1) / 1e3  # a millisecond
    if share >= 1:
        return math.inf, math.inf
    batch = 0.0
    for _ in range(_ITERATIONS):
        step = costs.steps.decode(max(1.0, batch), max(1.0, batch) * context)
        wanted = tokens * step / (1 - share)
        if wanted > 1e5:
            return math.inf, math.inf
        if abs(wanted - batch) < 1e-6:
            break
        batch = wanted
    else:
        if wanted > batch * 1.01:
            return math.inf, math.inf
    return batch, costs.steps.decode(max(1.0, batch), max(1.0, batch) * context)


def _wait(service: float, usage: float, servers: int, variation: float) -> tuple[float, float]:
    """Mean and 99th percentile of the wait for one of ``servers``."""
    offered = usage * servers
    blocked = _erlang_b(servers, offered)
    waiting = blocked / (1 - usage * (1 - blocked))  # Erlang's C: the share that waits
    if not waiting:
        return 0.0, 0.0
    mean = waiting * service / (servers * (1 - usage)) * variation
    return mean, max(0.0, math.log(waiting / 0.01)) * mean / waiting


def _erlang_b(servers: int, offered: float) -> float:
    blocked = 1.0
    for count in range(1, servers + 1):
        blocked = offered * blocked / (count + offered * blocked)
    return blocked


def _outside(sender: Costs, costs: Costs, traffic: Traffic, pair: bool) -> float:
    """Milliseconds around the engines: API servers, router, and the transfer of the last layer group."""
    requests = costs.requests
    around = sender.requests.request + requests.answer + requests.api_token + requests.router
    if not pair:
        return around
    link = costs.transfer
    last = traffic.input_len * link.bytes_per_token / link.layer_groups / (link.bandwidth * 1e6)
    return around + last + link.latency + 2 * link.message + 0.5


def _lognormal_p99(cv: float) -> float:
    """The 99th percentile of a log-normal distribution over its mean."""
    variance = math.log1p(cv**2)
    return math.exp(_P99 * math.sqrt(variance) - variance / 2)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _cv(values: Sequence[float]) -> float:
    """Coefficient of variation."""
    mean = _mean(values)
    return math.sqrt(_mean([(value - mean) ** 2 for value in values])) / mean if mean else 0.0
