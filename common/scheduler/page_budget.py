"""Page budget: pages for requests to be admitted, and for running requests to grow into."""

from __future__ import annotations

from collections.abc import Sequence

from ..kvcache.manager import KVCacheManager
from ..request.req import Req
from .new_token_ratio import NewTokenRatio, remaining_output
from .request_queues import RequestQueues


class PageBudget:
    """Allocates one rank's pages. Reserves some for the output that admitted requests are expected to generate."""

    def __init__(self, cache: KVCacheManager, new_token_ratio: NewTokenRatio, queues: RequestQueues):
        self.cache = cache
        self.new_token_ratio = new_token_ratio
        self._queues = queues

    def __repr__(self) -> str:
        return f"PageBudget({self.cache}, {self.new_token_ratio})"

    def reserve(self, req: Req, num_tokens: int, prefix_limit: int) -> bool:
        """Lock the cached prefix and allocate the other pages of the first ``num_tokens`` tokens.

        Leaves running requests pages to grow into; False, and no change, where that does not fit.
        """
        table = (self.cache.new_private_table() if req.embeds is not None else
                 self.cache.match_prefix(req.tokens.view(), prefix_limit, req.namespace))
        if self._shortfall(req, table.count, num_tokens) > 0 or not self.cache.allocate_slots(table, num_tokens):
            self.cache.release(table)
            return False
        req.page_table = table
        return True

    def shortfall(self, req: Req, num_tokens: int, prefix_limit: int) -> int:
        """Pages that must become free before ``reserve`` succeeds, 0 or less where it would now."""
        if req.embeds is not None:
            return self._shortfall(req, 0, num_tokens)
        # what is locked cannot be evicted
        table = self.cache.match_prefix(req.tokens.view(), prefix_limit, req.namespace)
        shortfall = self._shortfall(req, table.count, num_tokens)
        self.cache.release(table)
        return shortfall

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
        """Allocate the page of the request's next token, where it needs one; False, and no change, where none is
        free."""
        assert req.page_table is not None
        return req.complete or self.cache.allocate_slots(req.page_table, req.length)

    def release(self, reqs: Sequence[Req], *, keep: bool) -> None:
        """Free the requests' pages; ``keep`` leaves the full ones in the prefix cache."""
        self.cache.release_all([(req.page_table, req.computed if keep and self.cache.is_cacheable(req.page_table)
                                 else None) for req in reqs if req.page_table is not None])
        for req in reqs:
            req.page_table = None
            req.num_computed_tokens = 0
