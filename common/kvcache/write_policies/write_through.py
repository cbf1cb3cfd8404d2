"""Copies pages once they are computed, so that eviction finds them copied."""

from __future__ import annotations

from ...config.server.tiers import WRITE_POLICIES
from ..eviction.base import Usage


@WRITE_POLICIES.register("write_through")
class WriteThrough:
    ahead = False

    def at_commit(self, usage: Usage) -> bool:
        return True

    def at_reuse(self, usage: Usage) -> bool:
        return False

    def at_eviction(self, usage: Usage) -> bool:
        return True  # the tier may have dropped them
