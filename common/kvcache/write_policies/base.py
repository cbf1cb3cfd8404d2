"""Interface of a write policy."""

from __future__ import annotations

from typing import Protocol

from ..eviction.base import Usage


class WritePolicy(Protocol):
    """Says which pages of the prefix cache its tier gets; those that it has already are never copied again. ``usage``
    is that of the pages' edge in the tree."""

    ahead: bool
    """True where pages that are next to be evicted are copied before memory is short."""

    def at_commit(self, usage: Usage) -> bool:
        """Decides when computed pages enter the cache."""

    def at_reuse(self, usage: Usage) -> bool:
        """Decides when one more request reads pages that are in the cache, which ``usage`` counts already."""

    def at_eviction(self, usage: Usage) -> bool:
        """Decides when pages leave the cache."""
