"""Least frequently used first, of equals the least recently used."""

from __future__ import annotations

from ...config.server.cache import EVICTION_POLICIES
from .base import Rank, Usage


@EVICTION_POLICIES.register("lfu")
class LeastFrequentlyUsed:
    def rank(self, usage: Usage) -> Rank:
        return usage.num_uses, usage.last_used
