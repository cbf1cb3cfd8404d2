"""Tail-optimized LRU: the end of a conversation that is computed again within the bound goes first.

A next turn of ``history + next_prompt_estimate`` tokens computes at most ``threshold`` of them when the cache has all
but the last ``threshold - next_prompt_estimate`` tokens of the conversation: what is cached beyond shortens no wait
that is too long. (Zhang et al., "Tail-Optimized Caching for LLM Inference", arXiv 2510.15152, 2025.)
"""

from __future__ import annotations

from dataclasses import dataclass

from ...api.errors import ConfigError
from ...config.server.cache import EVICTION_POLICIES
from .base import Rank, Usage


@EVICTION_POLICIES.register("tlru")
@dataclass(frozen=True)
class TailOptimizedLRU:
    """``threshold``: tokens of a prompt that are computed within the wished time to the first token;
    ``next_prompt_estimate``: tokens that a next turn adds."""

    threshold: int = 0
    next_prompt_estimate: int = 0

    def __post_init__(self) -> None:
        if self.threshold <= self.next_prompt_estimate:
            raise ConfigError('--radix-eviction-policy tlru needs --radix-eviction-policy-config \'{"threshold": '
                              'TOKENS, "next_prompt_estimate": TOKENS}\', the first above the second.')

    def rank(self, usage: Usage) -> Rank:
        spare = usage.begin >= usage.history + self.next_prompt_estimate - self.threshold
        return int(not spare), usage.last_used
