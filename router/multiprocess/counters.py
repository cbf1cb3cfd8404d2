"""Counters of each process as data, and their sums: these never fall, whichever process dies."""

from __future__ import annotations

from typing import Any

import msgspec

from ..obs.metrics import Histogram, Metrics

Counts = dict[str, list[tuple[list[Any], list[float]]]]
"""Attribute of ``Metrics`` -> pairs of a key, as a list, and its numbers (a histogram's buckets, then its total)."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Counts).decode
_ADMISSION = "refused"
_PARENTS = "circuits_opened"
"""A counter of the parent alone."""


def dump(metrics: Metrics) -> bytes:
    """Encodes all counters of a process."""
    entries = {name: [(_key(key), _numbers(value)) for key, value in counts.items()]
             for name, counts in vars(metrics).items() if isinstance(counts, dict) and not name.startswith("_")}
    entries |= {name: [([], [count])] for name, count in vars(metrics).items() if type(count) is int}
    if metrics.admission is not None:
        entries[_ADMISSION] = [(_key(why), [count]) for why, count in metrics.admission.refused.items()]
    return _encode(entries)


class Totals:
    """The sums over processes, those that ended included."""

    def __init__(self, count: int):
        self._latest: list[Counts] = [{} for _ in range(count)]
        self._ended: list[Counts] = []

    def update(self, child: int, counts: bytes) -> None:
        self._latest[child] = _decode(counts)

    def ended(self, child: int) -> None:
        """Notes that a process ended; the one that replaces it counts from zero."""
        self._ended = [_sum([*self._ended, self._latest[child]])]
        self._latest[child] = {}

    def fill(self, metrics: Metrics, refused: dict[str, int]) -> None:
        """Sets ``metrics`` and ``refused`` to the sums."""
        for name, entries in _sum([*self._ended, *self._latest]).items():
            if name == _PARENTS:
                continue
            counts: Any = refused if name == _ADMISSION else getattr(metrics, name)
            for key, numbers in entries:
                if isinstance(counts, int):
                    setattr(metrics, name, int(numbers[0]))
                elif len(numbers) > 1:
                    histogram = counts[_unkey(key)]
                    histogram.counts, histogram.total = [int(number) for number in numbers[:-1]], numbers[-1]
                else:
                    counts[_unkey(key)] = int(numbers[0])


def _sum(parts: list[Counts]) -> Counts:
    summed: dict[str, dict[tuple[Any, ...], list[float]]] = {}
    for part in parts:
        for name, entries in part.items():
            sums = summed.setdefault(name, {})
            for key, numbers in entries:
                known = sums.get(tuple(key))
                sums[tuple(key)] = [a + b for a, b in zip(known, numbers)] if known else numbers
    return {name: [(list(key), numbers) for key, numbers in entries.items()] for name, entries in summed.items()}


def _key(key: Any) -> list[Any]:
    return list(key) if isinstance(key, tuple) else [key]


def _unkey(key: list[Any]) -> Any:
    return tuple(key) if len(key) > 1 else key[0]


def _numbers(value: Any) -> list[float]:
    return [*value.counts, value.total] if isinstance(value, Histogram) else [value]
