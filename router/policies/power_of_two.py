"""The less loaded of two random workers.

Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001): the fullest of n
workers then holds O(log log n) requests more than the average, against O(log n) for one choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..workers.registry import Worker
from .base import Decision, Policy, Subject, nothing


class PowerOfTwo:
    read = staticmethod(nothing)

    def __init__(self, rng: Random):
        self._rng = rng

    def choose(self, workers: Sequence[Worker], subject: Subject) -> Decision:
        if len(workers) == 1:
            return Decision(workers[0], "only")
        first, second = self._rng.sample(workers, 2)
        return Decision(first if first.load <= second.load else second, "lighter")


@ROUTING_POLICIES.register("power_of_two")
def make(args: PolicyArgs, rng: Random) -> Policy:
    return PowerOfTwo(rng)
