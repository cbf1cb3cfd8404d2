"""Clusters to choose among, and those of them that a closed form rules out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..costs.model import Costs
from ..predict import Prediction, Traffic, predict
from ..world.cluster import ClusterSpec
from .args import Plan

_HOPELESS = 4.0
"""A mean latency, predicted, this many times its limit is not simulated: the closed form is rarely off by half."""
_OVERLOAD = 1.1
"""Likewise a predicted utilisation."""


@dataclass(frozen=True)
class Candidate:
    """A cluster, the names of its cost tables, and the closed form's prediction."""

    spec: ClusterSpec
    costs: str
    prefill_costs: str
    predicted: Prediction

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def flags(self) -> str:
        """The flags that are varied."""
        schedule = self.spec.schedule
        mixed = ", mixed chunks" if schedule.enable_mixed_chunk else ""
        return f"chunk {schedule.chunked_prefill_size}, {self.spec.policy.policy}{mixed}"


def candidates(config: Plan, tables: Mapping[str, Costs], traffic: Traffic, gpus: int) -> Iterator[Candidate]:
    """Yields the clusters of exactly ``gpus`` GPUs, all with the given flags."""
    args = config.plan

    def made(costs: str, prefill_costs: str, unified: int = 0, prefill: int = 0, decode: int = 0) -> Candidate:
        sender = tables[prefill_costs] if prefill else None
        spec = ClusterSpec(tables[costs], unified, prefill, decode, sender, config.schedule, config.policy)
        return Candidate(spec, costs, prefill_costs, predict(
            tables[costs], traffic, unified=unified, prefill=prefill, decode=decode, prefill_costs=sender,
            chunk=_chunk(config), max_running_requests=config.schedule.max_running_requests))

    for name, costs in tables.items():
        if args.only != "pairs" and gpus % costs.gpus == 0:
            yield made(name, name, unified=gpus // costs.gpus)
        if args.only == "unified":
            continue
        for sender_name, sender in tables.items():
            for count in range(1, gpus // sender.gpus + 1):
                rest = gpus - count * sender.gpus
                if rest > 0 and rest % costs.gpus == 0:
                    yield made(name, sender_name, prefill=count, decode=rest // costs.gpus)


def _chunk(config: Plan) -> int:
    size = config.schedule.chunked_prefill_size
    return size if size > 0 else 1 << 20


def is_hopeless(config: Plan, predicted: Prediction) -> bool:
    """True where the closed form misses the objective by so much that a simulation would not change it."""
    if max(predicted.prefill_usage, predicted.kv_usage) > _OVERLOAD:
        return True
    if not predicted.stable:
        return predicted.batch == float("inf")
    slo = config.plan.objective.slo
    limits = {} if slo is None else slo.limits
    means = {"ttft": predicted.ttft_mean, "tpot": predicted.tpot_mean, "e2e": predicted.e2e_mean}
    return any(means[name] > _HOPELESS * limit for name, limit in limits.items())


def variants(config: Plan, candidate: Candidate) -> Iterator[Candidate]:
    """Yields a cluster with other chunk sizes, mixed chunks and policies."""
    spec, args = candidate.spec, config.plan
    unified = bool(spec.unified)
    for chunk in dict.fromkeys((spec.schedule.chunked_prefill_size, *args.chunk_sizes)):
        for mixed in (False, True) if unified else (spec.schedule.enable_mixed_chunk,):
            for policy in dict.fromkeys((spec.policy.policy, *args.policies)):
                schedule = replace(spec.schedule, chunked_prefill_size=chunk, enable_mixed_chunk=mixed)
                other = replace(spec, schedule=schedule, policy=replace(spec.policy, policy=policy))
                if other != spec and (policy == spec.policy.policy or spec.unified > 1 or spec.prefill > 1
                                      or spec.decode > 1):
                    yield replace(candidate, spec=other)
