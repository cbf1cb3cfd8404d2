"""Least slack first: the request that must start soonest to give its first token in time.

A request's slack is what is left of its ``slo_ttft`` after the time that computing its prompt takes. Under overload the
least slack is negative: requests that cannot be in time any more come after those that can, or each of them would only
make the next one late too. One of them runs after every ``LATE_TURN`` others, so that none starves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ...config.server.schedule import SCHEDULE_POLICIES
from ...request.req import Req
from .order import KeyOrder, Order, OrderInputs

LATE_TURN = 16
MARGIN = 1.1
"""Steps are a little longer than their tokens say: a request that would be in time by less is taken for late."""


class LeastSlackFirst:
    def __init__(self, inputs: OrderInputs):
        self._inputs = inputs
        self._in_time = KeyOrder(self.latest_start)
        self._late = KeyOrder(lambda req: 0.0)
        self._is_late: set[Req] = set()
        self._turns = 0  # requests that were in time since a late one

    def __len__(self) -> int:
        return len(self._in_time) + len(self._late)

    def latest_start(self, req: Req) -> float:
        """The time by which the request must start, on the scheduler's clock."""
        uncached = len(req.tokens) - self._inputs.cached_tokens(req)
        due = req.arrived + (self._inputs.default_slo_ttft if req.slo_ttft is None else req.slo_ttft)
        return due - MARGIN * uncached * self._inputs.pace.seconds_per_token

    def add(self, req: Req) -> None:
        self._in_time.add(req)

    def first(self) -> Req:
        while len(self._in_time) and not (len(self._late) and self._turns >= LATE_TURN):
            req = self._in_time.first()
            if self.latest_start(req) >= self._inputs.pace.now:
                return req
            self._in_time.discard(req)
            self._late.add(req)
            self._is_late.add(req)
        return self._late.first()

    def discard(self, req: Req) -> None:
        if req in self._is_late:
            self._is_late.discard(req)
            self._late.discard(req)
            self._turns = 0
        else:
            self._in_time.discard(req)
            self._turns += 1


@SCHEDULE_POLICIES.register("slo")
def make(inputs: OrderInputs) -> Callable[[], Order]:
    return partial(LeastSlackFirst, inputs)
