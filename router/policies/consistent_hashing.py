"""sglang-router's ``consistent_hashing``: a worker by its index in the list, or the same one for a routing key."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from ...common.api.errors import WorkerUnavailable
from ..config.policy import ROUTING_POLICIES, PolicyArgs
from ..net.body import RoutingFields
from ..net.request import Request
from ..workers.registry import Worker
from .base import ROUTING_KEY, Decision, Policy
from .consistent_hash import WorkerRing

_TARGET = b"x-smg-target-worker"
_IMPLICIT = (b"x-forwarded-for", b"cookie")


class ConsistentHashing:
    """By ``X-SMG-Target-Worker`` (an index), else ``X-SMG-Routing-Key``, else the client's Authorization,
    X-Forwarded-For or Cookie; a client that shows none of them gets any worker."""

    def __init__(self, rng: Random):
        self._rng = rng
        self._ring = WorkerRing()

    def read(self, request: Request, fields: RoutingFields | None) -> tuple[bytes, bytes]:
        """Returns the target's index and the routing key, each b"" where there is none."""
        target = request.header(_TARGET)
        key = request.header(ROUTING_KEY) or request.authorization
        return target, key or next((value for name in _IMPLICIT if (value := request.header(name))), b"")

    def choose(self, workers: Sequence[Worker], subject: tuple[bytes, bytes]) -> Decision:
        """Raises WorkerUnavailable where the target is none of the workers."""
        target, key = subject
        if target:
            if not (target.isdigit() and len(target) < 6 and int(target) < len(workers)):
                raise WorkerUnavailable(f"X-SMG-Target-Worker {target.decode('latin-1')[:20]!r} is none of the "
                                        f"{len(workers)} available workers, which count from 0.", retry_after=1.0)
            return Decision(workers[int(target)], "target")
        if not key:
            return Decision(self._rng.choice(workers), "no_session")
        return Decision(self._ring.owner(workers, key), "session")


@ROUTING_POLICIES.register("consistent_hashing")
def make(args: PolicyArgs, rng: Random) -> Policy:
    return ConsistentHashing(rng)
