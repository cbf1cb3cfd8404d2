"""Any worker, all equally likely."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..workers.registry import Worker
from .base import Decision, Policy, Subject, nothing


class RandomChoice:
    read = staticmethod(nothing)

    def __init__(self, rng: Random):
        self._rng = rng

    def choose(self, workers: Sequence[Worker], subject: Subject) -> Decision:
        return Decision(self._rng.choice(workers), "random")


@ROUTING_POLICIES.register("random")
def make(args: PolicyArgs, rng: Random) -> Policy:
    return RandomChoice(rng)
