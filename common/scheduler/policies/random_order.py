"""Random order."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from ...config.server.schedule import SCHEDULE_POLICIES
from ...request.req import Req
from .order import KeyOrder, Order, OrderInputs


class RandomKey:
    """Draws a number for each request as it is added. Ranks of a group, which add the same requests in the same order,
    draw the same numbers from the same seed."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def __call__(self, req: Req) -> float:
        return self._random.random()


@SCHEDULE_POLICIES.register("random")
def make(inputs: OrderInputs) -> Callable[[], Order]:
    return partial(KeyOrder, RandomKey(inputs.seed))
