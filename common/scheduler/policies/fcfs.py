"""First come, first served."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...config.server.schedule import SCHEDULE_POLICIES
from ...request.req import Req
from .order import KeyOrder, Order, OrderInputs


@SCHEDULE_POLICIES.register("fcfs")
def make(inputs: OrderInputs) -> Callable[[], Order]:
    return partial(KeyOrder, key)


def key(req: Req) -> float:
    """The same key for all: an order leaves equal requests in order of arrival."""
    return 0.0
