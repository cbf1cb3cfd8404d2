"""Flags of routing policies."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from ...common.api.errors import ConfigError
from ...common.config.cli import flag
from ...common.registry import Choices, Registry
from .checks import not_negative, positive

if TYPE_CHECKING:
    from ..policies.base import PolicyFactory

ROUTING_POLICIES: Registry[PolicyFactory] = Registry("routing policy", "baton.router.policies")
_POLICY_CHOICES = Choices.of(ROUTING_POLICIES)


@dataclasses.dataclass(frozen=True)
class PolicyArgs:
    policy: str = flag("cache_aware", choices=_POLICY_CHOICES, help="how a worker is chosen")
    prefill_policy: str | None = flag(
        None, choices=_POLICY_CHOICES, help="how a prefill worker is chosen (default: --policy)")
    decode_policy: str | None = flag(
        None, choices=_POLICY_CHOICES, help="how a decode worker is chosen (default: --policy)")
    cache_threshold: float = flag(
        0.5, help="cache_aware: least share of a prompt that a worker must have seen to be preferred")
    balance_abs_threshold: int = flag(
        32, help="cache_aware: ignore caches when the workers' loads differ by more requests than this ...")
    balance_rel_threshold: float = flag(1.0001, help="cache_aware: ... and by more than this factor")
    max_tree_size: int = flag(2**24, help="cache_aware: bytes of prompt text remembered a worker")

    eviction_interval: float = flag(
        60.0, names=("--eviction-interval-secs",),
        help="cache_aware: seconds after which text that was not seen again is forgotten, once memory fills up")
    host_page_cost: float | None = flag(None, help=(
        "cache_exact: time to load a page from a worker's host memory, as a share of that to compute it (default: as "
        "the worker measures it; 0.12 until then)"))
    storage_page_cost: float | None = flag(None, help=(
        "cache_exact: the same of a page in the workers' storage (default: as measured; 0.6 until then)"))
    hash_header: str = flag("x-session-id", help=(
        "consistent_hash: header that names a session; without it session_params.id, session_id, prompt_cache_key or "
        "user of the body does"))

    assignment_mode: Literal["random", "min_load", "min_group"] = flag(
        "random", help="manual: a new routing key goes to any worker, the one with the fewest requests, or the one "
                       "with the fewest keys")
    max_idle_secs: float = flag(
        14400.0, help="manual: forget routing keys that were not used for this long; 0: never for their age")
    bucket_adjust_interval_secs: float = flag(
        5.0, help="bucket: time after which the ranges of prompt lengths are recomputed")
    prefix_token_count: int = flag(
        256, help="prefix_hash: tokens of a prompt that choose its worker (of text, four bytes count as one)")
    prefix_hash_load_factor: float = flag(
        1.25, help="prefix_hash: a worker with this many times the mean of the requests in flight gets no more")

    def __post_init__(self) -> None:
        if not 0 <= self.cache_threshold <= 1:
            raise ConfigError(f"--cache-threshold must be between 0 and 1, not {self.cache_threshold}.")
        not_negative(self, "max_tree_size", "max_idle_secs", "host_page_cost", "storage_page_cost")
        positive(self, "eviction_interval", "bucket_adjust_interval_secs", "prefix_token_count",
                 "prefix_hash_load_factor")
        if not self.hash_header.strip() or any(c in self.hash_header for c in ": \t\r\n"):
            raise ConfigError(f"--hash-header must be a header's name, not {self.hash_header!r}.")

    def policy_for(self, role: str) -> str:
        """The policy that chooses among workers of ``role``."""
        return {"prefill": self.prefill_policy, "decode": self.decode_policy}.get(role) or self.policy
