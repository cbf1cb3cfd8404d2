"""The queue of requests that wait."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from ..request.req import Req
from .policies.order import Order


class _Lane:
    """Waiting requests of one urgency: those that were put back, the last one first, then the others in their order."""

    def __init__(self, order: Order):
        self.returned: dict[Req, None] = {}
        self.order = order

    def __len__(self) -> int:
        return len(self.returned) + len(self.order)

    def first(self) -> Req:
        return next(reversed(self.returned)) if self.returned else self.order.first()

    def discard(self, req: Req) -> None:
        if req in self.returned:
            del self.returned[req]
        else:
            self.order.discard(req)


class WaitingQueue:
    """The most urgent come first; among equals those that have run before, then as the policy orders.

    Adding, taking out and looking at the first cost the same however many wait (but for a logarithm).
    """

    def __init__(self, make_order: Callable[[], Order], urgency: Callable[[Req], int]):
        self._make_order = make_order
        self._urgency = urgency
        self._lanes: dict[int, _Lane] = {}
        self._urgencies: list[int] = []  # of the lanes, ascending
        self._members: dict[Req, int] = {}  # in the order of their coming, with their urgency

    def __repr__(self) -> str:
        return f"WaitingQueue({', '.join(f'{len(self._lanes[u])} at {u}' for u in reversed(self._urgencies))})"

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, req: Req) -> bool:
        return req in self._members

    def __iter__(self) -> Iterator[Req]:
        """In the order of their coming."""
        return iter(self._members)

    def append(self, req: Req) -> None:
        self._lane_for(req).order.add(req)

    def put_back(self, req: Req) -> None:
        """Before all that are as urgent."""
        self._lane_for(req).returned[req] = None

    def head(self) -> Req | None:
        return self._lanes[self._urgencies[-1]].first() if self._urgencies else None

    def remove(self, req: Req) -> None:
        urgency = self._members.pop(req)
        lane = self._lanes[urgency]
        lane.discard(req)
        if not len(lane):
            del self._lanes[urgency]
            del self._urgencies[bisect_left(self._urgencies, urgency)]

    def reorder(self, make_order: Callable[[], Order]) -> None:
        """Go on with another policy."""
        self._make_order = make_order
        for urgency, lane in self._lanes.items():
            members = [req for req, own in self._members.items() if own == urgency and req not in lane.returned]
            lane.order = make_order()
            for req in members:
                lane.order.add(req)

    def _lane_for(self, req: Req) -> _Lane:
        assert req not in self._members, f"{req} waits already"
        urgency = self._members[req] = self._urgency(req)
        if urgency not in self._lanes:
            self._lanes[urgency] = _Lane(self._make_order())
            insort(self._urgencies, urgency)
        return self._lanes[urgency]
