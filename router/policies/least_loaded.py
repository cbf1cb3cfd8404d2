"""The worker with the fewest requests of this router; equals take turns."""

from __future__ import annotations

from collections.abc import Sequence

from ..registry import Worker
from .base import Decision, Subject, least_loaded, nothing


class LeastLoaded:
    read = staticmethod(nothing)

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, workers: Sequence[Worker], subject: Subject) -> Decision:
        self._turn += 1
        return Decision(least_loaded(workers, self._turn), "least")
