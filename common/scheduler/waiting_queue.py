"""Waiting queue: priority levels, each with its own order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..request.req import Req
from .policies.order import Order

MAX_BLOCKED = 64
"""Requests of one urgency that are set aside because they do not fit, at most: more are not looked at."""


class Admission(Protocol):
    """Memory for the requests of one queue."""

    @property
    def headroom(self) -> int:
        """Pages that new requests may take."""

    def pages(self, req: Req) -> int:
        """Pages of ``headroom`` that ``req`` takes."""

    def reserve(self, req: Req) -> bool:
        """Allocate the request's pages; False, and no change, where they do not fit."""


@dataclass
class _Blocked:
    """A request that did not fit: the pages that it takes, and those that requests behind it may take before it."""

    pages: int
    allowance: int


class _Level:
    """Waiting requests of one urgency: first the requeued ones, the newest first, then the blocked ones in the order in
    which they were set aside, then the others in their order."""

    def __init__(self, order: Order):
        self.requeued: dict[Req, None] = {}
        self.blocked: dict[Req, _Blocked] = {}
        self.order = order

    def __len__(self) -> int:
        return len(self.requeued) + len(self.blocked) + len(self.order)

    def first(self) -> Req:
        if self.requeued:
            return next(reversed(self.requeued))
        return next(iter(self.blocked)) if self.blocked else self.order.first()

    def discard(self, req: Req) -> None:
        if req in self.requeued:
            del self.requeued[req]
        elif req in self.blocked:
            del self.blocked[req]
        else:
            self.order.discard(req)

    def admit(self, admission: Admission, backfill_ratio: float) -> Req | None:
        """See WaitingQueue.admit; the request stays in its place."""
        if admission.reserve(first := self.first()):
            return first
        return None if self.requeued or not backfill_ratio else self._backfill(admission, backfill_ratio)

    def _backfill(self, admission: Admission, ratio: float) -> Req | None:
        """Return a request that is admitted before the first, which does not fit."""
        limit, passed = admission.headroom, list[_Blocked]()
        for req, blocked in self.blocked.items():
            if passed and blocked.pages <= limit and admission.reserve(req):
                return self._charge(req, passed, blocked.pages)
            passed.append(blocked)
            limit = min(limit, blocked.allowance)
            if limit <= 0:
                return None
        while limit > 0 and len(self.order) and len(self.blocked) < MAX_BLOCKED:
            req = self.order.first()
            pages = admission.pages(req)
            if passed and pages <= limit and admission.reserve(req):
                return self._charge(req, passed, pages)
            self.order.discard(req)
            self.blocked[req] = blocked = _Blocked(pages, int(ratio * pages))
            passed.append(blocked)
            limit = min(limit, blocked.allowance)
        return None

    @staticmethod
    def _charge(req: Req, passed: list[_Blocked], pages: int) -> Req:
        for blocked in passed:
            blocked.allowance -= pages
        return req


class WaitingQueue:
    """The most urgent requests come first; among equals those that have run before, then the policy decides.

    Adding, removing and looking at the first cost the same however many wait (up to a logarithm).

    A request that does not fit is set aside, and those behind it may pass it (backfilling) until they have taken
    ``backfill_ratio`` times the pages that it takes. Then none passes it: what running requests free is left for it.
    Less urgent requests pass none, and a requeued request is not passed, because memory has just run out.
    """

    def __init__(self, make_order: Callable[[], Order], urgency: Callable[[Req], int], backfill_ratio: float = 0.0):
        self._make_order = make_order
        self._urgency = urgency
        self._backfill_ratio = backfill_ratio
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

    def admit(self, admission: Admission, above: int | None = None) -> Req | None:
        """Remove and return the next request for which ``admission`` reserves pages; None where there is none, or none
        that is more urgent than ``above``."""
        if not self._urgencies or (above is not None and self._urgencies[-1] <= above):
            return None
        req = self._levels[self._urgencies[-1]].admit(admission, self._backfill_ratio)
        if req is not None:
            self.remove(req)
        return req

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
            level.blocked.clear()
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
