"""Settings of ``baton_plan``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...common.api.errors import ConfigError
from ...common.bench.report.goodput import Slo
from ...common.config.cli import flag, nested
from ...common.config.rules import at_least
from ...common.config.server import ScheduleArgs
from ...router.config.policy import ROUTING_POLICIES, PolicyArgs
from ..args import DEFAULT_COSTS, NOT_ROUTED, NOT_SIMULATED, WorkloadArgs
from ..costs import model
from ..results.figures import Figures

DEFAULT_REQUESTS = 600


@dataclass(frozen=True)
class PlanArgs:
    costs: tuple[str, ...] = flag((DEFAULT_COSTS,), some=True, help=(
        "cost tables of the servers to choose among, such as one for each --tp-size: names or files"))
    max_gpus: int = flag(8, help="most GPUs of the cluster")
    goodput: tuple[str, ...] = flag((), metavar="METRIC:MS", help=(
        "service level objective: ttft, tpot and e2e in milliseconds, as in ttft:500 tpot:20"))
    attainment: float = flag(0.99, help="share of the requests that must be within the objective")
    interactivity: float | None = flag(None, help=(
        "least output tokens a second that 90 % of the users see, waiting included: the inverse of the 90th "
        "percentile of end-to-end time an output token"))
    chunk_sizes: tuple[int, ...] = flag((2048, 8192), some=True, help=(
        "values of --chunked-prefill-size to try where the given one does not reach the objective"))
    policies: tuple[str, ...] = flag(("cache_aware", "least_loaded"), some=True, help=(
        "values of the router's --policy to try likewise"))
    only: Literal["pairs", "unified"] | None = flag(None, help="clusters to choose among (default: both)")
    model_path: str = flag("MODEL", help="model of the printed commands and values")
    helm_values: str | None = flag(None, help="write values of the Helm chart (deploy/helm/baton) to this file")
    output_file: str | None = flag(None, help="append the plan to this file, as a line of JSON")
    html: str | None = flag(None, help="write a page with the frontier and all candidates")
    plot: str | None = flag(None, help="write the frontier alone, as SVG")
    jobs: int = flag(1, help="processes that simulate")

    def __post_init__(self) -> None:
        at_least(self, 1, "max_gpus", "jobs")
        if not 0 < self.attainment <= 1:
            raise ConfigError(f"--attainment must be above 0 and at most 1, not {self.attainment:g}.")
        if Slo.parse(self.goodput) is None and self.interactivity is None:
            raise ConfigError("A plan needs an objective: --goodput ttft:500 tpot:20, or --interactivity 50.")
        if self.interactivity is not None and not self.interactivity > 0:
            raise ConfigError(f"--interactivity must be above 0 tokens a second, not {self.interactivity:g}.")
        if any(size < 16 for size in self.chunk_sizes):
            raise ConfigError("--chunk-sizes must be 16 tokens or more.")
        for name in self.policies:
            ROUTING_POLICIES.get(name)

    @property
    def objective(self) -> Objective:
        return Objective(Slo.parse(self.goodput), self.attainment, self.interactivity)

    def tables(self) -> dict[str, model.Costs]:
        """The cost tables by the names that were given. Raises ConfigError."""
        return {name: model.load(name) for name in self.costs}


@dataclass(frozen=True)
class Objective:
    """Goal of a cluster: a share of requests within an SLO, an interactivity in tokens a second, or both."""

    slo: Slo | None
    attainment: float
    interactivity: float | None

    def met(self, figures: Figures) -> bool:
        return self.distance(figures) <= 0

    def distance(self, figures: Figures) -> float:
        """By how much it is missed, as a share; 0 or less where it is met."""
        missed = [-1.0]
        if self.slo is not None:
            missed.append(self.attainment - (figures.attainment or 0.0))
        if self.interactivity is not None:
            missed.append(1 - interactivity(figures) / self.interactivity)
        if figures.failed:
            missed.append(1.0)
        return max(missed)

    def __str__(self) -> str:
        parts = [] if self.slo is None else [f"{self.attainment:.4g} of the requests within {self.slo}"]
        if self.interactivity is not None:
            parts.append(f"{self.interactivity:g} tokens a second for 90 % of the users")
        return ", ".join(parts)


def interactivity(figures: Figures) -> float:
    """Output tokens a second that 90 % of the users see, waiting included."""
    return 1e3 / figures.normalized_p90


@dataclass(frozen=True)
class Plan:
    """The configuration of ``baton_plan``."""

    plan: PlanArgs
    workload: WorkloadArgs
    schedule: ScheduleArgs = nested(omit=NOT_SIMULATED)
    policy: PolicyArgs = nested(omit=NOT_ROUTED)
