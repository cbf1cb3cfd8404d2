"""Compares simulations with measured runs: relative errors of means and percentiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ...common.api.errors import ConfigError
from ..costs.model import Costs, load
from ..workload.request import SimRequest

SHIPPED = Path(__file__).parent / "measured"
METRICS = ("ttft", "tpot", "e2e")
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: float(np.mean(values)), "p50": lambda values: float(np.percentile(values, 50)),
    "p99": lambda values: float(np.percentile(values, 99))}


class Measured(msgspec.Struct, frozen=True):
    """A run that was measured: the servers, the requests ``[at, input tokens, output tokens]`` in seconds after the
    first, and what their client saw, in milliseconds and in any order. ``costs``: the table of these servers, fitted to
    other requests; ``source``: machine and command."""

    name: str
    date: str
    requests: list[tuple[float, int, int]]
    ttft_ms: list[float]
    tpot_ms: list[float]
    e2e_ms: list[float]
    unified: int = 0
    prefill: int = 0
    decode: int = 0
    pool_tokens: int | None = None
    costs: Costs | str = ""
    source: str = ""
    client_cpu: float = 0.0

    def table(self) -> Costs:
        return self.costs if isinstance(self.costs, Costs) else load(self.costs)

    def values(self, metric: str) -> list[float]:
        found: list[float] = getattr(self, f"{metric}_ms")
        return found


@dataclass(frozen=True)
class Compared:
    """One figure of one run, in milliseconds."""

    run: str
    metric: str
    statistic: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def read_measured(path: Path) -> Measured:
    """Raises ConfigError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measured)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} is no measured run: {error}.") from None


def shipped() -> list[Measured]:
    return [read_measured(path) for path in sorted(SHIPPED.glob("*.json"))]


def compare(measured: Measured, costs: Costs | None = None) -> list[Compared]:
    """Simulates the requests of a run, with its own cost table or ``costs``."""
    from ..world.cluster import ClusterSpec, simulate

    spec = ClusterSpec(costs or measured.table(), measured.unified, measured.prefill, measured.decode,
                       pool_tokens=measured.pool_tokens, router=bool(measured.prefill) or measured.unified > 1)
    run = simulate([SimRequest(*each) for each in measured.requests], spec)
    simulated = {"ttft": [outcome.ttft * 1e3 for outcome in run.outcomes],
                 "tpot": [outcome.tpot * 1e3 for outcome in run.outcomes if outcome.tpot is not None],
                 "e2e": [outcome.e2e * 1e3 for outcome in run.outcomes]}
    return [Compared(measured.name, metric, name, of(measured.values(metric)), of(simulated[metric]))
            for metric in METRICS for name, of in STATISTICS.items()]


def validation_table(compared: Sequence[Compared]) -> str:
    """A row for each run and metric, and the errors over all runs."""
    lines = [f"{'run':<34}{'ms':<6}" + "".join(f"{name + ' measured':>15}{'simulated':>11}{'error':>8}"
                                                for name in STATISTICS)]
    for run in dict.fromkeys(each.run for each in compared):
        for metric in METRICS:
            row = [each for each in compared if each.run == run and each.metric == metric]
            lines.append(f"{run:<34}{metric.upper():<6}" + "".join(
                f"{each.measured:>15,.2f}{each.simulated:>11,.2f}{each.error:>+8.1%}" for each in row))
    return "\n".join([*lines, "", *summary(compared)])


def summary(compared: Sequence[Compared]) -> list[str]:
    """The mean and the largest amount of the errors, by statistic."""
    lines = []
    for name in STATISTICS:
        amounts = [abs(each.error) for each in compared if each.statistic == name]
        lines.append(f"error of the {name:<5}{np.mean(amounts):>7.1%} on average, {max(amounts):.1%} at most, over "
                     f"{len(amounts)} figures")
    return lines
