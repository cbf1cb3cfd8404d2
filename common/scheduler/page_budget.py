"""Pages for requests: for those that are admitted, and for those that run to grow into."""

from __future__ import annotations

from collections.abc import Sequence

from ..kvcache.manager import KVCacheManager
from ..request.req import Req
from .new_token_ratio import NewTokenRatio, left_of
from .request_queues import RequestQueues


class PageBudget:
    """Deals out one rank's pages. Beside ``places``, it counts on the ``output`` that is expected of them."""

    def __init__(self, cache: KVCacheManager, output: NewTokenRatio, places: RequestQueues):
        self.cache = cache
        self.output = output
        self._places = places

    def __repr__(self) -> str:
        return f"Room({self.cache}, {self.output})"

    def reserve(self, req: Req, num_tokens: int, prefix_limit: int) -> bool:
        """Borrow the cached prefix and allocate the other pages of the first ``num_tokens`` tokens.

        Leaves those that run pages to grow into; False, and no change, where that does not fit.
        """
        hold = self.cache.begin_private() if req.embeds is not None else self.cache.begin(req.tokens.view(),
                                                                                         prefix_limit)
        lacking = self._lacking(req, hold.count, num_tokens)
        if lacking > 0 or not self.cache.grow(hold, num_tokens):
            self.cache.release(hold)
            return False
        req.hold = hold
        return True

    def lacking(self, req: Req, num_tokens: int, prefix_limit: int) -> int:
        """Pages that must become free before ``reserve`` succeeds, 0 or less where it would now."""
        if req.embeds is not None:
            return self._lacking(req, 0, num_tokens)
        hold = self.cache.begin(req.tokens.view(), prefix_limit)  # what is locked cannot be evicted
        lacking = self._lacking(req, hold.count, num_tokens)
        self.cache.release(hold)
        return lacking

    def _lacking(self, req: Req, num_cached_pages: int, num_tokens: int) -> int:
        missing = self.cache.pages_for(num_tokens) - num_cached_pages
        return missing + self._to_leave(req) - self.cache.num_available

    def _to_leave(self, req: Req) -> int:
        """A page for each running request, and for the output to expect; a request alone needs no more than itself."""
        places = self._places
        if not places.num_with_pages:
            return 0
        return len(places.running) + self.cache.pages_for(self.output.tokens(places.left + left_of(req)))

    def grow(self, req: Req) -> bool:
        """The page of the request's next token, where it wants one; False, and no change, where there is none."""
        assert req.hold is not None
        return req.complete or self.cache.grow(req.hold, req.length)

    def release(self, reqs: Sequence[Req], *, keep: bool) -> None:
        """Free the requests' pages; ``keep`` leaves the full ones in the prefix cache."""
        self.cache.release_each([(req.hold, req.computed if keep and self.cache.publishes(req.hold) else None)
                                 for req in reqs if req.hold is not None])
        for req in reqs:
            req.hold = None
            req.num_computed_tokens = 0
