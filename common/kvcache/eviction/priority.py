"""Pages of the least urgent requests first, of equals the least recently used."""

from __future__ import annotations

from ...config.server.cache import EVICTION_POLICIES
from .base import Rank, Usage


@EVICTION_POLICIES.register("priority")
class LeastUrgent:
    def rank(self, usage: Usage) -> Rank:
        return usage.priority, usage.last_used
