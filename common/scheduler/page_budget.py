"""Page budget: pages for requests to be admitted, and for running requests to grow into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..kvcache.manager import KVCacheManager, PageTable
from ..request.req import Req
from .new_token_ratio import NewTokenRatio, remaining_output
from .policies.priority import Priorities
from .request_queues import RequestQueues


class PageBudget:
    """Allocates one rank's pages. Reserves some for the output that admitted requests are expected to generate."""

    def __init__(self, cache: KVCacheManager, new_token_ratio: NewTokenRatio, queues: RequestQueues,
                 priorities: Priorities):
        self.cache = cache
        self.new_token_ratio = new_token_ratio
        self._queues = queues
        self._priorities = priorities

    def __repr__(self) -> str:
        return f"PageBudget({self.cache}, {self.new_token_ratio})"

    def reserve(self, req: Req, num_tokens: int, prefix_limit: int) -> bool:
        """Lock the cached prefix and allocate the other pages of the first ``num_tokens`` tokens.

        In further cache groups the request reserves pages, which each of its steps allocates. Where ``prefix_limit`` is
        ``num_tokens``, no step computes these tokens: another server does, and all pages are allocated.

        Leaves running requests pages to grow into; False, and no change, where that does not fit.
        """
        table = self._match(req, num_tokens, prefix_limit)
        if self._shortfall(req, table.count, num_tokens) > 0 or not self._allocate(req, table, num_tokens,
                                                                                 prefix_limit):
            self.cache.release(table)
            return False
        req.page_table = table
        self.cache.record_use(table, self._priorities.urgency(req))
        return True

    @property
    def headroom(self) -> int:
        """Pages for requests to be admitted: those available, but what running requests are expected to need."""
        queues = self._queues
        if not queues.num_admitted:
            return self.cache.num_available
        expected = self.cache.pages_for(self.new_token_ratio.reserved_tokens(queues.remaining))
        return self.cache.num_available - len(queues.running) - expected

    def pages(self, req: Req, num_tokens: int, prefix_limit: int) -> int:
        """Pages of ``headroom`` that ``reserve`` with the same arguments takes, expected output among them."""
        available = self.cache.num_available
        table = self._match(req, num_tokens, prefix_limit)
        missing = self.cache.pages_for(num_tokens) - table.count
        locked = available - self.cache.num_available  # cached, and evictable until then
        self.cache.release(table)
        return missing + locked + self.cache.pages_for(self.new_token_ratio.reserved_tokens(remaining_output(req)))

    def shortfalls(self, req: Req, num_tokens: int, prefix_limit: int) -> list[int]:
        """Pages of each cache group that must become free before ``reserve`` succeeds, 0 or less where it would now."""
        further = [group.num_reserved + group.bound_for(req.max_tokens) - group.num_pages
                   for group in self.cache.groups]
        table = self._match(req, num_tokens, prefix_limit)  # what is locked cannot be evicted
        shortfall = self._shortfall(req, table.count, num_tokens)
        self.cache.release(table)
        return [shortfall, *further]

    def _match(self, req: Req, num_tokens: int, prefix_limit: int) -> PageTable:
        incoming = prefix_limit == num_tokens
        if req.embeds is not None:
            return self.cache.new_private_table(num_tokens if incoming else 0)
        if incoming:
            return self.cache.match_incoming(req.tokens.view(0, num_tokens), req.namespace)
        return self.cache.match_prefix(req.tokens.view(), prefix_limit, req.namespace)

    def _allocate(self, req: Req, table: PageTable, num_tokens: int, prefix_limit: int) -> bool:
        if not self.cache.reserve(table, req.max_tokens):
            return False
        if prefix_limit == num_tokens:
            return self.cache.allocate_incoming(table, num_tokens)
        swapped = 0 if req.swapped_out is None else req.swapped_out.num_tokens
        if swapped > table.num_cached_pages * self.cache.page_size and not self.cache.allocate_incoming(
                table, swapped, 1):
            return False
        return self.cache.allocate_slots(table, num_tokens)

    def _shortfall(self, req: Req, num_cached_pages: int, num_tokens: int) -> int:
        missing = self.cache.pages_for(num_tokens) - num_cached_pages
        return missing + self._reserved_pages(req) - self.cache.num_available

    def _reserved_pages(self, req: Req) -> int:
        """A page for each running request, and those of the expected output; a request alone needs only its own."""
        queues = self._queues
        if not queues.num_admitted:
            return 0
        expected = self.new_token_ratio.reserved_tokens(queues.remaining + remaining_output(req))
        return len(queues.running) + self.cache.pages_for(expected)

    def allocate_next(self, req: Req) -> bool:
        """Allocate the pages of the request's next token, where it needs any; False where too few are free."""
        assert req.page_table is not None
        return req.complete or self.cache.allocate_next(req.page_table, req.length)

    def release(self, reqs: Sequence[Req], *, keep: bool) -> None:
        """Free the requests' pages; ``keep`` leaves the full ones in the prefix cache."""
        for req in reqs:
            if not req.keeps_pages and req.page_table is not None:
                self.cache.scrub(req.page_table)
        self.cache.release_all([(req.page_table, req.computed(self.cache.lookahead)
                                 if keep and req.keeps_pages and self.cache.is_cacheable(req.page_table) else None)
                                for req in reqs if req.page_table is not None])
        for req in reqs:
            req.page_table = None
            req.num_computed_tokens = 0


@dataclass(frozen=True)
class QueueAdmission:
    """Page budget of one queue: requests whose prompt this server computes, or whose pages another server fills
    (``incoming``)."""

    budget: PageBudget
    incoming: bool = False

    @property
    def headroom(self) -> int:
        return self.budget.headroom

    def extent(self, req: Req) -> tuple[int, int]:
        """The arguments ``num_tokens`` and ``prefix_limit`` of ``PageBudget.reserve``."""
        return (req.num_prompt_tokens,) * 2 if self.incoming else (len(req.tokens), req.prefix_limit)

    def pages(self, req: Req) -> int:
        return self.budget.pages(req, *self.extent(req))

    def reserve(self, req: Req) -> bool:
        return self.budget.reserve(req, *self.extent(req))
