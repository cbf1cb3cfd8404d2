"""Fits a cost table to the samples of a server, by least squares of relative errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...common.api.errors import ConfigError
from ..costs.model import Costs, RequestCosts, StepCosts, TransferCosts
from .samples import DecodeSample, PrefillSample, PromptSample, Samples


@dataclass(frozen=True)
class Fitted:
    """A table, and by how much its samples differ from it: names of samples with their relative errors."""

    costs: Costs
    errors: dict[str, list[float]]


def fit(samples: Samples, *, name: str, gpus: int = 1, layer_groups: int = 2, description: str = "") -> Fitted:
    """Raises ConfigError where there are too few samples."""
    if len(samples.prompts) < 4 or not samples.decode:
        raise ConfigError("A cost table needs prompts of several lengths and decode steps.")
    prefill = _prefill(samples)
    batches, base, context = _decode(samples.decode)
    steps = StepCosts(prefill.step, prefill.token, prefill.context, tuple(batches), tuple(base), context,
                      host_prefill=prefill.host)
    costs = Costs(name, samples.model, description or samples.device, steps, _requests(samples, prefill.outside),
                  TransferCosts(layer_groups=layer_groups), samples.kv_tokens or 400_000, samples.page_size, gpus,
                  {"all": f"bench_calibrate: {len(samples.prompts)} prompts alone, {len(samples.prefill)} prefill "
                          f"steps, {len(samples.decode)} decode batches"})
    if samples.pair:
        costs = replace(costs, transfer=_transfer(samples, costs))
    return Fitted(costs, _errors(samples, costs))


def _solve(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Least squares of relative errors with coefficients of 0 or more: a negative one is set to 0, and the others are
    solved anew."""
    scale = 1.0 / np.array(values)
    matrix = np.array(rows, float) * scale[:, None]
    columns = list(range(matrix.shape[1]))
    found = np.zeros(matrix.shape[1])
    while columns:
        part, *_ = np.linalg.lstsq(matrix[:, columns], np.ones(len(values)), rcond=None)
        if (part >= 0).all():
            found[columns] = part
            break
        columns.pop(int(part.argmin()))
    return [float(value) for value in found]


@dataclass(frozen=True)
class _Prefill:
    """Costs of prefill steps, the milliseconds around the engine, and the squares of the relative errors."""

    step: float
    token: float
    context: float
    host: float
    outside: float
    error: float


def _prefill(samples: Samples) -> _Prefill:
    """Prompts of fewer tokens than a threshold, if any, take what the host needs to launch a step. Takes the threshold
    that fits best."""
    alone, steps = _medians(samples.prompts), median_steps(samples.prefill)
    thresholds = [each.tokens for each in alone[:max(1, len(alone) - 2)]]
    return min((_prefill_above(alone, steps, threshold, samples.chunk) for threshold in thresholds),
               key=lambda each: each.error)


def _prefill_above(alone: Sequence[PromptSample], steps: Sequence[PrefillSample], threshold: int,
                   chunk: int) -> _Prefill:
    """The fit where prompts below ``threshold`` tokens take as long as each other."""
    rows = [[-(-each.tokens // chunk), each.tokens, each.tokens**2 / 2, 1.0] for each in alone
            if each.tokens >= threshold]
    values = [each.ms for each in alone if each.tokens >= threshold]
    large = [each for each in steps if each.tokens >= threshold]
    rows += [[1.0, each.tokens, each.pairs, 0.0] for each in large]
    values += [each.ms for each in large]
    step, token, context, outside = _solve(rows, values)
    small = [each.ms - outside for each in alone if each.tokens < threshold]
    host = float(np.median(small)) if small else min(1.0, step)
    costs = StepCosts(step, token, context, (1,), (0.0,), 0.0, host_prefill=max(0.0, host))
    errors = [(costs.prompt(each.tokens, chunk=chunk) + outside) / each.ms - 1 for each in alone]
    errors += [costs.prefill(each.tokens, each.pairs) / each.ms - 1 for each in steps]
    return _Prefill(step, token, context, costs.host_prefill, outside, sum(error**2 for error in errors))


def median_steps(samples: Sequence[PrefillSample]) -> list[PrefillSample]:
    """One sample for each shape of a step."""
    shapes = sorted({(each.tokens, each.pairs) for each in samples})
    return [PrefillSample(*shape, float(np.median([each.ms for each in samples if (each.tokens, each.pairs) == shape])))
            for shape in shapes]


def _medians(samples: Sequence[PromptSample]) -> list[PromptSample]:
    """One sample for each length."""
    return [PromptSample(length, float(np.median([each.ms for each in samples if each.tokens == length])))
            for length in sorted({each.tokens for each in samples})]


def _decode(samples: Sequence[DecodeSample]) -> tuple[list[int], list[float], float]:
    """``decode_batches, decode_base, decode_context``."""
    batches = sorted({each.rows for each in samples})
    one_context = len(samples) == len(batches)  # the context's share of their time cannot be known
    rows = [[*(float(each.rows == batch) for batch in batches), 0.0 if one_context else each.context]
            for each in samples]
    *base, context = _solve(rows, [each.ms for each in samples])
    rising = np.maximum.accumulate(base).tolist()  # more rows never take less
    return batches, rising, context


def _requests(samples: Samples, outside: float) -> RequestCosts:
    """``outside``: milliseconds from sending to reading, less the engine's. In a burst requests queue at the API
    server, so that each further one takes as long as that works on it."""
    token = min((each.spread / each.rows for each in samples.decode if each.rows > 1), default=0.012)
    bursts = sorted(samples.bursts, key=lambda each: each.requests)
    rate = 0.4
    if len(bursts) > 1 and bursts[-1].requests > bursts[0].requests:
        rate = max(0.0, (bursts[-1].ms - bursts[0].ms) / (bursts[-1].requests - bursts[0].requests))
    answer = min(0.3, 0.3 * outside)
    request = max(0.0, outside - answer - token)
    return RequestCosts(request, answer, min(rate, request), token, 0.0)


def _transfer(samples: Samples, costs: Costs) -> TransferCosts:
    """The bandwidth by the counters; the latency and the router's time are what prompts alone through a pair take
    beyond what is simulated without them."""
    from ..workload.request import SimRequest
    from ..world.cluster import ClusterSpec, simulate

    if samples.write_seconds <= 0 or samples.written <= 0:
        raise ConfigError("The prefill server counts no writes: was the pair's router given?")
    known = replace(costs.transfer, bandwidth=samples.written / samples.write_seconds / 1e9, latency=0.0,
                    bytes_per_token=round(samples.written / samples.written_tokens))
    spec = ClusterSpec(replace(costs, transfer=known), prefill=1, decode=1, prefix_cache=False)
    rest = []
    for each in _medians(samples.pair):
        [outcome] = simulate([SimRequest(0.0, each.tokens, 1)], spec).outcomes
        rest.append(each.ms - outcome.ttft * 1e3)
    return replace(known, latency=max(0.0, float(np.median(rest))))


def _errors(samples: Samples, costs: Costs) -> dict[str, list[float]]:
    """Relative errors of the table, by kind of sample."""
    steps, requests = costs.steps, costs.requests
    outside = requests.request + requests.answer + requests.api_token
    return {
        "prompts alone": [(steps.prompt(each.tokens, chunk=samples.chunk) + outside) / each.ms - 1
                          for each in _medians(samples.prompts)],
        "prefill steps": [steps.prefill(each.tokens, each.pairs) / each.ms - 1
                          for each in median_steps(samples.prefill)],
        "decode steps": [steps.decode(each.rows, each.context) / each.ms - 1 for each in samples.decode],
    }
