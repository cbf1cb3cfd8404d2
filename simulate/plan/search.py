"""Finds the cheapest cluster: by GPUs ascending, the closed form first, then simulations."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from ...common.bench.report.goodput import Slo
from ..predict import Traffic
from ..results.figures import Figures, figures
from ..workload.request import SimRequest, at_rate, rate_of
from ..world.cluster import ClusterSpec, simulate
from .args import Objective, Plan, interactivity
from .candidates import Candidate, candidates, is_hopeless, variants

_NEAR_MISSES = 2
"""Clusters of each number of GPUs that are tried with other flags: those that miss the objective by the least."""
_CAPACITY_STEPS = 5
_MOST_HEADROOM = 4.0


@dataclass(frozen=True)
class Result:
    """A candidate with its simulated figures."""

    candidate: Candidate
    figures: Figures

    @property
    def interactivity(self) -> float:
        return interactivity(self.figures)

    @property
    def throughput_per_gpu(self) -> float:
        """Output tokens a second and GPU."""
        return self.figures.rate(self.figures.output_tokens) / self.figures.gpus


@dataclass
class Found:
    """The plan: the cheapest cluster that meets the objective, None where the budget has none; ``results`` are all that
    were simulated, ``ruled_out`` those that the closed form spared. ``capacity``: requests a second that the chosen
    cluster still serves within the objective."""

    objective: Objective
    traffic: Traffic
    results: list[Result] = field(default_factory=list)
    ruled_out: list[Candidate] = field(default_factory=list)
    chosen: Result | None = None
    capacity: float | None = None

    def frontier(self) -> list[Result]:
        """The results that no other one beats in both interactivity and throughput a GPU, by interactivity."""
        best: list[Result] = []
        for result in sorted(self.results, key=lambda each: (-each.interactivity, -each.throughput_per_gpu)):
            if not best or result.throughput_per_gpu > best[-1].throughput_per_gpu * (1 + 1e-9):
                best.append(result)
        return best[::-1]


Run = Callable[[Sequence[Candidate]], list[Result]]


def search(config: Plan, requests: Sequence[SimRequest], progress: Callable[[str], None] = lambda text: None) -> Found:
    """Raises ConfigError where a cost table cannot be read."""
    args = config.plan
    objective, tables = args.objective, args.tables()
    found = Found(objective, Traffic.of(requests))
    with _runner(requests, objective.slo, config.workload.seed, args.jobs) as run:
        for gpus in range(1, args.max_gpus + 1):
            level = list(candidates(config, tables, found.traffic, gpus))
            found.ruled_out += [each for each in level if is_hopeless(config, each.predicted)]
            results = run([each for each in level if not is_hopeless(config, each.predicted)])
            if results and not any(objective.met(each.figures) for each in results):
                near = sorted(results, key=lambda each: objective.distance(each.figures))[:_NEAR_MISSES]
                results += run([other for each in near for other in variants(config, each.candidate)])
            found.results += results
            met = [each for each in results if objective.met(each.figures)]
            progress(f"{gpus} GPUs: {len(level)} clusters, {len(results)} simulations, {len(met)} meet the objective")
            if met:
                found.chosen = min(met, key=lambda each: _margin(objective, each.figures))
                break
    if found.chosen is not None:
        found.capacity = capacity(found.chosen.candidate.spec, requests, objective, config.workload.seed)
    return found


def _margin(objective: Objective, figures: Figures) -> float:
    """The worst latency as a share of its limit."""
    parts = [0.0]
    if objective.slo is not None:
        parts += [getattr(figures, name).p99 / limit for name, limit in objective.slo.limits.items()]
    if objective.interactivity is not None:
        parts.append(objective.interactivity / interactivity(figures))
    return max(parts)


def capacity(spec: ClusterSpec, requests: Sequence[SimRequest], objective: Objective, seed: int) -> float:
    """Requests a second up to which the cluster meets the objective with the same pattern of arrivals, by bisection
    between the workload's rate and four times that; it is met at the former."""
    rate = rate_of(requests)
    low, high = rate, rate * _MOST_HEADROOM
    for _ in range(_CAPACITY_STEPS):
        middle = (low * high) ** 0.5
        met = objective.met(figures(simulate(at_rate(requests, middle), spec, seed=seed), objective.slo))
        low, high = (middle, high) if met else (low, middle)
    return low


@contextmanager
def _runner(requests: Sequence[SimRequest], slo: Slo | None, seed: int, jobs: int) -> Iterator[Run]:
    if jobs == 1:
        yield lambda wanted: [_simulated(requests, slo, seed, each) for each in wanted]
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _begin, (requests, slo, seed)) as pool:
        yield lambda wanted: list(pool.map(_simulated_there, wanted))


_shared: tuple[Sequence[SimRequest], Slo | None, int]


def _begin(*shared: object) -> None:
    global _shared
    _shared = shared  # type: ignore[assignment]


def _simulated_there(candidate: Candidate) -> Result:
    return _simulated(*_shared, candidate)


def _simulated(requests: Sequence[SimRequest], slo: Slo | None, seed: int, candidate: Candidate) -> Result:
    return Result(candidate, figures(simulate(requests, candidate.spec, seed=seed), slo))
