"""One worker after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

from ..workers.registry import Worker
from .base import Decision, Subject, nothing


class RoundRobin:
    read = staticmethod(nothing)

    def __init__(self) -> None:
        self.turns: Iterator[int] = count(1)

    def choose(self, workers: Sequence[Worker], subject: Subject) -> Decision:
        return Decision(workers[next(self.turns) % len(workers)], "turn")
