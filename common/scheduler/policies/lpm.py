"""Longest prefix match first: requests with the most cached pages run before these are evicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...config.server.schedule import SCHEDULE_POLICIES
from ...kvcache.prefix_cache import PrefixCache
from ...request.req import Req
from .order import Order, OrderInputs, sorted_by_cache


class LongestPrefixFirst:
    def __init__(self, cache: PrefixCache):
        self._cache = cache

    def __call__(self, reqs: Sequence[Req]) -> list[Req]:
        """Sort by matched pages; equal requests stay in order of arrival. Touches the matches: they are evicted
        last."""
        return sorted(reqs, key=lambda req: -len(self._cache.match(req.tokens.view(0, req.prefix_limit),
                                                                   req.namespace)[1]))


@SCHEDULE_POLICIES.register("lpm", traits=("prefix_cache",))
def make(inputs: OrderInputs) -> Callable[[], Order]:
    return sorted_by_cache(LongestPrefixFirst, inputs)
