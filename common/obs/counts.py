"""Counters and histograms of several processes as data, and their sums, which never fall, whichever process ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

Counts = dict[str, list[tuple[str, dict[str, str], float]]]
"""Family of metrics -> its samples: name, labels, value."""

_SUMMED = ("counter", "histogram")


def counts_of(metrics: Iterable[Metric]) -> Counts:
    """Returns the counters and histograms among ``metrics``."""
    return {metric.name: [(sample.name, sample.labels, sample.value) for sample in metric.samples
                          if not sample.name.endswith("_created")]
            for metric in metrics if metric.type in _SUMMED}


class SummedCounts:
    """The counts of other processes, those that ended included."""

    def __init__(self) -> None:
        self._latest: dict[int, Counts] = {}
        self._ended: Counts = {}

    def update(self, process: int, counts: Counts) -> None:
        """Takes the counts of a process since it started."""
        self._latest[process] = counts

    def end(self, process: int) -> None:
        """Notes that a process ended; the one that replaces it counts from zero."""
        self._ended = _sum([self._ended, self._latest.pop(process, {})])

    def total(self, family: str) -> float:
        """The sum of all samples of a counter."""
        return sum(value for counts in (self._ended, *self._latest.values())
                   for _, _, value in counts.get(family, ()))

    def add_to(self, metrics: Iterable[Metric]) -> Iterator[Metric]:
        """Yields ``metrics`` with these counts added: to a sample of the same labels, or as a further sample."""
        sums = _sum([self._ended, *self._latest.values()])
        for metric in metrics:
            others = {_key(name, labels): (name, labels, value)
                      for name, labels, value in sums.get(metric.name, ())}
            if others:
                metric.samples = [
                    sample._replace(value=sample.value + others.pop(_key(sample.name, sample.labels), _ZERO)[2])
                    for sample in metric.samples] + [Sample(*other) for other in others.values()]
            yield metric


_ZERO: tuple[str, dict[str, str], float] = "", {}, 0.0


def _key(name: str, labels: dict[str, str]) -> tuple[object, ...]:
    return name, *sorted(labels.items())


def _sum(parts: list[Counts]) -> Counts:
    summed: dict[str, dict[tuple[object, ...], tuple[str, dict[str, str], float]]] = {}
    for part in parts:
        for family, samples in part.items():
            sums = summed.setdefault(family, {})
            for name, labels, value in samples:
                key = _key(name, labels)
                sums[key] = name, labels, value + (sums[key][2] if key in sums else 0.0)
    return {family: list(sums.values()) for family, sums in summed.items()}
