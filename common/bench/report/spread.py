"""A summary of a distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of ascending values (at least one), interpolated linearly as numpy does."""
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


@dataclass(frozen=True)
class Spread:
    """Summary of ``count`` values, in their unit; all nan where there is none."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if not values:
            return cls(0, *(math.nan,) * 7)
        ordered = sorted(values)
        mean = math.fsum(ordered) / len(ordered)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in ordered) / len(ordered))
        p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
        return cls(len(ordered), mean, std, p50, p90, p95, p99, ordered[-1])

    def keyed(self, name: str) -> dict[str, float | None]:
        """SGLang's keys; None in place of nan, which JSON lacks."""
        named = {"mean": self.mean, "median": self.p50, "std": self.std, "p90": self.p90, "p95": self.p95,
                 "p99": self.p99, "max": self.max}
        return {f"{key}_{name}": None if math.isnan(value) else value for key, value in named.items()}
