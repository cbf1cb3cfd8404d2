"""Waiting queue: priority levels, each with its own order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from ..request.req import Req
from .policies.order import Order


class _Level:
    """Waiting requests of one urgency: first the requeued ones, the newest first, then the others in their order."""

    def __init__(self, order: Order):
        self.requeued: dict[Req, None] = {}
        self.order = order

    def __len__(self) -> int:
        return len(self.requeued) + len(self.order)

    def first(self) -> Req:
        return next(reversed(self.requeued)) if self.requeued else self.order.first()

    def discard(self, req: Req) -> None:
        if req in self.requeued:
            del self.requeued[req]
        else:
            self.order.discard(req)


class WaitingQueue:
    """The most urgent requests come first; among equals those that have run before, then the policy decides.

    Adding, removing and looking at the first cost the same however many wait (up to a logarithm).
    """

    def __init__(self, make_order: Callable[[], Order], urgency: Callable[[Req], int]):
        self._make_order = make_order
        self._urgency = urgency
        self._levels: dict[int, _Level] = {}
        self._urgencies: list[int] = []  # of the levels, ascending
        self._urgency_of: dict[Req, int] = {}  # in order of arrival

    def __repr__(self) -> str:
        return f"WaitingQueue({', '.join(f'{len(self._levels[u])} at {u}' for u in reversed(self._urgencies))})"

    def __len__(self) -> int:
        return len(self._urgency_of)

    def __contains__(self, req: Req) -> bool:
        return req in self._urgency_of

    def __iter__(self) -> Iterator[Req]:
        """In order of arrival."""
        return iter(self._urgency_of)

    def append(self, req: Req) -> None:
        self._add_member(req).order.add(req)

    def requeue(self, req: Req) -> None:
        """Insert a retracted request before all that are as urgent."""
        self._add_member(req).requeued[req] = None

    def peek(self) -> Req | None:
        """The first request, None where none waits."""
        return self._levels[self._urgencies[-1]].first() if self._urgencies else None

    def remove(self, req: Req) -> None:
        urgency = self._urgency_of.pop(req)
        level = self._levels[urgency]
        level.discard(req)
        if not len(level):
            del self._levels[urgency]
            del self._urgencies[bisect_left(self._urgencies, urgency)]

    def reorder(self, make_order: Callable[[], Order]) -> None:
        """Switch to another policy."""
        self._make_order = make_order
        for urgency, level in self._levels.items():
            members = [req for req, own in self._urgency_of.items() if own == urgency and req not in level.requeued]
            level.order = make_order()
            for req in members:
                level.order.add(req)

    def _add_member(self, req: Req) -> _Level:
        """Record the request's urgency; returns the level to insert it into."""
        assert req not in self._urgency_of, f"{req} is in the queue already"
        urgency = self._urgency_of[req] = self._urgency(req)
        if urgency not in self._levels:
            self._levels[urgency] = _Level(self._make_order())
            insort(self._urgencies, urgency)
        return self._levels[urgency]
