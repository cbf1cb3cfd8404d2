"""Least recently used first."""

from __future__ import annotations

from ...config.server.cache import EVICTION_POLICIES
from .base import Rank, Usage


@EVICTION_POLICIES.register("lru")
class LeastRecentlyUsed:
    def rank(self, usage: Usage) -> Rank:
        return (usage.last_used,)
