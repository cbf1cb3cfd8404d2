"""Retraction: requests whose pages are freed for running requests, when pages run out, or for a more urgent one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...request.req import Req
from ..page_budget import PageBudget
from ..policies.priority import Priorities
from ..request_queues import RequestQueues

if TYPE_CHECKING:
    from ..tier_loads import TierLoads
    from .swap_space import SwapSpace


class Retraction:
    """Picks victims and frees their pages. A retracted request waits before its equals, and is resumed later."""

    def __init__(self, queues: RequestQueues, page_budget: PageBudget, priorities: Priorities, swap: SwapSpace | None,
                 remove: Callable[[Sequence[Req]], None], loads: TierLoads | None = None):
        """``swap``: the host cache that victims' pages may be swapped out to; ``loads``: of the tier that keeps them
        instead. ``remove`` takes requests out of their queues and batches."""
        self._queues = queues
        self._page_budget = page_budget
        self._priorities = priorities
        self._swap = swap
        self._remove = remove
        self._loads = loads
        self.num_retracted = 0
        self.num_preempted = 0

    def __repr__(self) -> str:
        return f"Retraction(retracted {self.num_retracted}, preempted {self.num_preempted})"

    def retract_decode(self) -> None:
        """Retract the least urgent running requests, of these the youngest, until the others have pages for their next
        tokens. No token may be pending."""
        running, budget = self._queues.running, self._page_budget
        short = [req for req in running if not budget.allocate_next(req)]
        if not short:
            return
        while short:
            victim = self._pick_victim(running)
            self._retract(victim)
            short = [req for req in short if req is not victim and not budget.allocate_next(req)]
        budget.new_token_ratio.on_retraction(running)

    def should_preempt_for(self, req: Req, num_tokens: int, prefix_limit: int, *, has_slot: bool) -> bool:
        """True where ``req`` cannot be admitted now, and could be once less urgent requests are preempted.

        It may lack pages (``PageBudget.reserve`` would be called with the same arguments) or, without ``has_slot``, a
        slot.
        """
        victims = self._preemptible(req)
        if not victims:
            return False
        shortfalls = self._page_budget.shortfalls(req, num_tokens, prefix_limit)
        tables = [victim.page_table for victim in victims if victim.page_table is not None]
        freed = [sum(table.count for table in tables),
                 *(sum(own.bound for own in of_group) for of_group in zip(*(table.groups for table in tables)))]
        return (all(short <= count for short, count in zip(shortfalls, freed))
                and (max(shortfalls) > 0 or not has_slot))

    def preempt_one_for(self, req: Req) -> None:
        """Retract the least urgent of the requests that ``req`` may preempt. No token may be pending."""
        self._retract(self._pick_victim(self._preemptible(req)))
        self.num_preempted += 1

    def retract_all(self) -> None:
        """Retract all requests that have pages, but those whose pages are being sent to other servers, and swap none
        out: the weights may be others later. No token may be pending."""
        if self._swap is not None:
            for req in self._queues.waiting:
                self._swap.discard(req)
        if self._loads is not None:
            self._loads.forget([*self._queues.waiting])
        for req in sorted([*self._queues.running, *self._queues.prefilling], key=lambda req: -req.arrived):
            if not req.sends_kv:
                self._free(req, keep=False)

    def _preemptible(self, req: Req) -> list[Req]:
        if not self._priorities.enabled:
            return []
        return [victim for queue in (self._queues.running, self._queues.prefilling) for victim in queue
                if not victim.sends_kv and self._priorities.may_preempt(req, victim)]

    def _pick_victim(self, reqs: list[Req]) -> Req:
        """The least urgent, and of these the youngest."""
        return min(reqs, key=lambda req: (self._priorities.urgency(req), -req.arrived))

    def _retract(self, req: Req) -> None:
        """Leave its full pages in the prefix cache, so that those that survive until it is resumed need not be
        recomputed; and swap all of them out to host memory, where that is cheaper, or keep the full ones in the
        tier."""
        if self._swap is not None:
            req.swapped_out = self._swap.swap_out(req)
        self._free(req, keep=True)

    def _free(self, req: Req, *, keep: bool) -> None:
        self._remove([req])
        if keep and self._loads is not None:
            self._loads.keep(req)
        self._page_budget.release([req], keep=True)
        req.num_retractions += 1
        self._queues.waiting.requeue(req)
        self.num_retracted += 1
