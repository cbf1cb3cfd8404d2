"""Longest output first: the longest runs start first, so that a batch of jobs does not end with a long one alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...config.server.schedule import SCHEDULE_POLICIES
from ...request.req import Req
from .order import KeyOrder, Order, OrderInputs


@SCHEDULE_POLICIES.register("lof")
def make(inputs: OrderInputs) -> Callable[[], Order]:
    return partial(KeyOrder, key)


def key(req: Req) -> float:
    return -float(req.sampling.max_new_tokens)
