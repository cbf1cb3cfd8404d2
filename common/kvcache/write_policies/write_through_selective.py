"""Copies pages when a second request uses them; what is used once is computed again."""

from __future__ import annotations

from ...config.server.tiers import WRITE_POLICIES
from ..eviction.base import Usage

MIN_USES = 2
"""Requests that have read a page that is worth a copy, that which computed it included."""


@WRITE_POLICIES.register("write_through_selective")
class WriteThroughSelective:
    ahead = False

    def at_commit(self, usage: Usage) -> bool:
        return usage.num_uses >= MIN_USES

    def at_reuse(self, usage: Usage) -> bool:
        return usage.num_uses == MIN_USES

    def at_eviction(self, usage: Usage) -> bool:
        return usage.num_uses >= MIN_USES
