"""The worker with the fewest requests of this router; equals take turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from random import Random

from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..workers.registry import Worker
from .base import Decision, Policy, Replication, Subject, nothing
from .load_view import LoadView


class LeastLoaded:
    read = staticmethod(nothing)

    def __init__(self) -> None:
        self._counter: Iterator[int] = count(1)
        self._loads = LoadView()

    def replicate(self, replication: Replication) -> None:
        self._counter = replication.counter() or self._counter

    def choose(self, workers: Sequence[Worker], subject: Subject) -> Decision:
        return Decision(self._loads.next_least_loaded(workers, next(self._counter)), "least")


@ROUTING_POLICIES.register("least_loaded")
def make(args: PolicyArgs, rng: Random) -> Policy:
    return LeastLoaded()
