"""Longest prefix match first: what the prefix cache has most of is computed before it is evicted."""

from __future__ import annotations

from collections.abc import Sequence

from ...kvcache.prefix_cache import PrefixCache
from ...request.req import Req


class LongestPrefixFirst:
    def __init__(self, cache: PrefixCache):
        self._cache = cache

    def __call__(self, reqs: Sequence[Req]) -> list[Req]:
        """Equal ones stay as they came. Touches what matches: it is evicted last."""
        return sorted(reqs, key=lambda req: -len(self._cache.match(req.tokens.view(0, req.prefix_limit))[1]))
