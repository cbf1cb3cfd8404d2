"""Requests that give their pages back: to those that run, when pages run out, or to one that is more urgent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...request.req import Req
from ..page_budget import PageBudget
from ..policies.priority import Priorities
from ..request_queues import RequestQueues

if TYPE_CHECKING:
    from .swap_space import SwapSpace


class Retraction:
    """Says who gives way and takes its pages; it waits before its equals, and goes on later."""

    def __init__(self, places: RequestQueues, room: PageBudget, priorities: Priorities, swap: SwapSpace | None,
                 detach: Callable[[Sequence[Req]], None]):
        """``swap``: where their pages may go. ``detach`` takes requests out of wherever they stand."""
        self._places = places
        self._room = room
        self._priorities = priorities
        self._swap = swap
        self._detach = detach
        self.num_retracted = 0
        self.num_preempted = 0

    def __repr__(self) -> str:
        return f"Retraction(retracted {self.num_retracted}, preempted {self.num_preempted})"

    def for_room(self) -> None:
        """Retract the least urgent running requests, of these the youngest, until the others can grow. No token may be
        pending."""
        running, room = self._places.running, self._room
        short = [req for req in running if not room.grow(req)]
        if not short:
            return
        while short:
            victim = self._least(running)
            self._retract(victim)
            short = [req for req in short if req is not victim and not room.grow(req)]
        room.output.retracted(running)

    def blocked(self, req: Req, num_tokens: int, prefix_limit: int, *, has_slot: bool) -> bool:
        """Whether ``req``, for which ``reserve`` would be called with the same, lacks what less urgent ones hold:
        pages, or without ``has_slot`` their slots."""
        givers = self._givers(req)
        if not givers:
            return False
        lacking = self._room.lacking(req, num_tokens, prefix_limit)
        held = sum(one.hold.count for one in givers if one.hold is not None)
        return lacking <= held and (lacking > 0 or not has_slot)

    def preempt_for(self, req: Req) -> None:
        """Retract the first of those that give way to ``req``. No token may be pending."""
        self._retract(self._least(self._givers(req)))
        self.num_preempted += 1

    def all(self) -> None:
        """Retract whatever has pages, and keep nothing of it in host memory: the weights may be others later. No token
        may be pending."""
        if self._swap is not None:
            for req in self._places.waiting:
                self._swap.drop(req)
        for req in sorted([*self._places.running, *self._places.prefilling], key=lambda req: -req.arrived):
            self._give_back(req)

    def _givers(self, req: Req) -> list[Req]:
        if not self._priorities.enabled:
            return []
        return [one for place in (self._places.running, self._places.prefilling) for one in place
                if self._priorities.may_preempt(req, one)]

    def _least(self, reqs: list[Req]) -> Req:
        """The least urgent, and of these the youngest."""
        return min(reqs, key=lambda req: (self._priorities.urgency(req), -req.arrived))

    def _retract(self, req: Req) -> None:
        """Its full pages go to the prefix cache, so that whatever is not evicted until it goes on need not be
        recomputed; and all of them to host memory, where that is cheaper."""
        if self._swap is not None:
            req.saved = self._swap.save(req)
        self._give_back(req)

    def _give_back(self, req: Req) -> None:
        self._detach([req])
        self._room.release([req], keep=True)
        req.num_retractions += 1
        self._places.waiting.put_back(req)
        self.num_retracted += 1
