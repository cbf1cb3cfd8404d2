"""One worker after the other."""

from __future__ import annotations

from collections.abc import Sequence

from ..registry import Worker
from .base import Decision, Subject, nothing


class RoundRobin:
    read = staticmethod(nothing)

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, workers: Sequence[Worker], subject: Subject) -> Decision:
        self._turn += 1
        return Decision(workers[self._turn % len(workers)], "turn")
