"""Copies pages when they leave the cache, or shortly before: the fewest copies, at the times when memory is short."""

from __future__ import annotations

from ...config.server.tiers import WRITE_POLICIES
from ..eviction.base import Usage


@WRITE_POLICIES.register("write_back")
class WriteBack:
    ahead = True

    def at_commit(self, usage: Usage) -> bool:
        return False

    def at_reuse(self, usage: Usage) -> bool:
        return False

    def at_eviction(self, usage: Usage) -> bool:
        return True
