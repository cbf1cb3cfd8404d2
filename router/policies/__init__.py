"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from ..config.policy import PolicyArgs
from ..registry import Role
from .base import Decision, Policy, Subject
from .cache_aware import MOST_BLOCKS, CacheAware
from .cache_exact import CacheExact
from .consistent_hash import ConsistentHash
from .least_loaded import LeastLoaded
from .power_of_two import PowerOfTwo
from .random import RandomChoice
from .round_robin import RoundRobin

__all__ = ["Decision", "Policy", "Subject", "build", "build_all"]


def _cache_aware(args: PolicyArgs, rng: Random) -> Policy:
    return CacheAware(cache_threshold=args.cache_threshold, balance_abs_threshold=args.balance_abs_threshold,
                      balance_rel_threshold=args.balance_rel_threshold, max_tree_size=args.max_tree_size,
                      eviction_interval=args.eviction_interval)


_BUILDERS: dict[str, Callable[[PolicyArgs, Random], Policy]] = {
    "cache_aware": _cache_aware,
    "cache_exact": lambda args, rng: CacheExact(
        balance_abs_threshold=args.balance_abs_threshold, balance_rel_threshold=args.balance_rel_threshold,
        max_tree_size=args.max_tree_size),
    "consistent_hash": lambda args, rng: ConsistentHash(args.hash_header),
    "least_loaded": lambda args, rng: LeastLoaded(),
    "power_of_two": lambda args, rng: PowerOfTwo(rng),
    "random": lambda args, rng: RandomChoice(rng),
    "round_robin": lambda args, rng: RoundRobin(),
}


def build(name: str, args: PolicyArgs, rng: Random) -> Policy:
    return _BUILDERS[name](args, rng)


def build_all(names: Mapping[Role, str], args: PolicyArgs, rng: Random) -> dict[Role, Policy]:
    """A policy for each role. ``cache_exact`` is one object for all: it chooses pairs, and follows workers once.

    The halves of pairs remember the same prompts, each for itself: they share the bound on memory.
    """
    exact = build("cache_exact", args, rng) if "cache_exact" in names.values() else None
    policies = {role: exact if exact is not None and name == "cache_exact" else build(name, args, rng)
                for role, name in names.items()}
    for role, policy in policies.items():
        if isinstance(policy, CacheAware) and role != "regular":
            policy.most_blocks = MOST_BLOCKS // 2
    return policies
