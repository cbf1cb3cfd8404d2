"""Segmented LRU: pages that few requests have read go before those that proved useful, in each segment the least
recently used first. Prompts that come once do not push out those that come again (Karedla et al., Computer, 1994)."""

from __future__ import annotations

from dataclasses import dataclass

from ...api.errors import ConfigError
from ...config.server.cache import EVICTION_POLICIES
from .base import Rank, Usage


@EVICTION_POLICIES.register("slru")
@dataclass(frozen=True)
class SegmentedLRU:
    """``protected_threshold``: requests, that which computed the pages included, after which these are protected."""

    protected_threshold: int = 2

    def __post_init__(self) -> None:
        if self.protected_threshold < 2:
            raise ConfigError("protected_threshold of --radix-eviction-policy-config must be at least 2, not "
                              f"{self.protected_threshold}: one request has read any page.")

    def rank(self, usage: Usage) -> Rank:
        return int(usage.num_uses >= self.protected_threshold), usage.last_used
