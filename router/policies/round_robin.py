"""One worker after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from ..workers.registry import Worker
from .base import Decision, Replication, Subject, nothing


class RoundRobin:
    read = staticmethod(nothing)

    def __init__(self) -> None:
        self._counter: Iterator[int] = count(1)

    def replicate(self, replication: Replication) -> None:
        self._counter = replication.counter() or self._counter

    def choose(self, workers: Sequence[Worker], subject: Subject) -> Decision:
        return Decision(workers[next(self._counter) % len(workers)], "turn")
