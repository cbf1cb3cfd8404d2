"""One worker after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from random import Random

from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..workers.registry import Worker
from .base import Decision, Policy, Replication, Subject, nothing


class RoundRobin:
    read = staticmethod(nothing)

    def __init__(self) -> None:
        self._counter: Iterator[int] = count(1)

    def replicate(self, replication: Replication) -> None:
        self._counter = replication.counter() or self._counter

    def choose(self, workers: Sequence[Worker], subject: Subject) -> Decision:
        return Decision(workers[next(self._counter) % len(workers)], "turn")


@ROUTING_POLICIES.register("round_robin")
def make(args: PolicyArgs, rng: Random) -> Policy:
    return RoundRobin()
