"""The router on the virtual clock: its real registry, policies and admission rules; only HTTP is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np

from ...common.api.errors import ConfigError
from ...router.config.endpoint import Endpoint
from ...router.config.policy import PolicyArgs
from ...router.net.body import RoutingFields
from ...router.policies import build_all
from ...router.policies.base import nothing
from ...router.policies.cache_aware import CacheAware
from ...router.workers.registry import Registry, Reservation, Worker
from ...router.workers.roles import REGULAR

UNKNOWN = {"cache_exact": "workers' KV events", "manual": "routing keys", "consistent_hash": "sessions",
           "prefix_hash": "prompts as JSON", "bucket": "prompts as JSON"}
"""Policies that read what a simulated request does not have."""


@dataclass
class Placed:
    """The servers of a request, with their reserved loads: one, or a prefill and a decode server."""

    reservations: list[Reservation]

    @property
    def names(self) -> list[str]:
        return [reservation.worker.endpoint.host for reservation in self.reservations]


class VirtualRouter:
    """Chooses servers, which are named by the hosts of their URLs."""

    def __init__(self, args: PolicyArgs, regular: Sequence[str], prefills: Sequence[str], decodes: Sequence[str],
                 seed: int):
        roles = [REGULAR] if regular else ["prefill", "decode"]
        names = {role: args.policy_for(role) for role in roles}
        for name in names.values():
            if name in UNKNOWN:
                raise ConfigError(f"--policy {name} cannot be simulated: it reads {UNKNOWN[name]}, which a workload "
                                  "does not have. Take cache_aware, least_loaded, power_of_two, round_robin or random.")
        self.registry = Registry()
        self._roles = roles
        self._policies = build_all(names, args, Random(seed))
        self._reads_text = any(isinstance(policy, CacheAware) for policy in self._policies.values())
        for role, workers in (("regular", regular), ("prefill", prefills), ("decode", decodes)):
            for name in workers:
                worker = Worker(Endpoint("http", name, 80, ""), role, bootstrap_port=1, model_id="simulated",
                                always_healthy=True)
                worker.state = "healthy"
                worker.checked = True
                self.registry.add(worker)

    def place(self, tokens: np.ndarray) -> Placed:
        """Choose the servers of a prompt with ``tokens`` [n] int32, and reserve their loads."""
        fields = RoutingFields(input_ids=msgspec.Raw(tokens.tobytes())) if self._reads_text else None
        reservations = []
        for role in self._roles:
            policy = self._policies[role]
            subject = None if policy.read is nothing else policy.read(None, fields)  # type: ignore[arg-type]
            worker = policy.choose(self.registry.available(role), subject).worker
            worker.change_load(1)
            reservations.append(Reservation(worker))
        return Placed(reservations)

    def sweep(self, now: float) -> None:
        """Do the policies' housekeeping."""
        for policy in self._policies.values():
            if hasattr(policy, "sweep"):
                policy.sweep(now)
