"""Policies of routing, one a file, registered there; the sets of policies that a router uses."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from random import Random

from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..net.request import Group
from ..workers.registry import Role
from ..workers.roles import REGULAR
from . import cache_exact
from .base import Decision, Policy, Subject
from .cache_aware import MAX_BLOCKS, CacheAware
from .cache_exact import CacheExact
from .load_view import LoadView

__all__ = ["Decision", "PolicySets", "Policy", "Subject", "build", "build_all"]


def build(name: str, args: PolicyArgs, rng: Random) -> Policy:
    return ROUTING_POLICIES.get(name)(args, rng)


def build_all(names: Mapping[Role, str], args: PolicyArgs, rng: Random,
              exact: CacheExact | None = None) -> dict[Role, Policy]:
    """Builds a policy for each role. ``cache_exact`` is one object for all: it chooses pairs, and follows workers once;
    ``exact`` is that of another model, which follows them already.

    Prefill and decode policies remember the same prompts, each for itself: they share the bound on memory.
    """
    if "cache_exact" in names.values():
        exact = exact.of_another_model() if exact is not None else cache_exact.make(args, rng)
    policies = {role: exact if exact is not None and name == "cache_exact" else build(name, args, rng)
                for role, name in names.items()}
    _bound_memory([policies])
    return policies


def _bound_memory(sets: Collection[Mapping[Role, Policy]]) -> None:
    """Divides the bound on all that may be remembered."""
    for policies in sets:
        for role, policy in policies.items():
            if isinstance(policy, CacheAware):
                policy.max_blocks = MAX_BLOCKS // (1 if role == REGULAR else 2) // len(sets)
            elif isinstance(policy, CacheExact):
                policy.max_blocks = MAX_BLOCKS // 2 // len(sets)


def _close(policies: Mapping[Role, Policy]) -> None:
    """Makes policies that are not used any more stop following their workers' loads."""
    for policy in policies.values():
        for part in vars(policy).values():
            if isinstance(part, LoadView):
                part.close()


class PolicySets:
    """The policies of all workers, and those of each model once it is requested: models share no prompts, rings or
    counters. The memory of all models together is bounded."""

    def __init__(self, names: Mapping[Role, str], args: PolicyArgs, rng: Random):
        self._build = partial(build_all, names, args, rng)
        self.common = self._build()
        self._sets: dict[Group, dict[Role, Policy]] = {None: self.common}
        self.exact = next((policy for policy in self.common.values() if isinstance(policy, CacheExact)), None)
        self.on_build: Callable[[Group, Mapping[Role, Policy]], None] = lambda group, policies: None
        """Called with the policies of each further model."""

    def of(self, group: Group) -> dict[Role, Policy]:
        return self._sets.get(group) or self._add(group)

    def _add(self, group: Group) -> dict[Role, Policy]:
        self._sets[group] = policies = self._build(self.exact)
        _bound_memory(self._sets.values())
        self.on_build(group, policies)
        return policies

    def sweep(self, now: float, groups: Collection[Group]) -> None:
        """Does housekeeping, every second or so; forgets models that are not among ``groups``."""
        for group in self._sets.keys() - {None, *groups}:
            _close(self._sets.pop(group))
            _bound_memory(self._sets.values())
        swept = {id(policy): policy for policies in self._sets.values() for policy in policies.values()}
        for policy in swept.values():
            if hasattr(policy, "sweep"):
                policy.sweep(now)
