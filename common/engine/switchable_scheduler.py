"""The scheduler of a server whose role may change while it runs (``--enable-pd-role-switch``).

It serves requests of all roles at once: the unified scheduler runs every step, the decode role's part reserves pages
and receives KV caches, and the prefill role's part sends those of the prompts that were asked for by a decode server.
Each request has a role of its own, which the API server gives it. So a change of the server's role concerns later
requests alone: those that run end as they began, with their pages, and nothing is drained. The prefix cache, the
weights and the CUDA graphs are those of all roles.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

from msgspec.structs import replace

from ..api.errors import ServingError
from ..api.identity import ModelIdentity
from ..api.messages import ConnectPeer, Done
from ..config.roles import ROLES, Role
from ..request.req import Req
from .loop import Scheduler
from .peers import Peers
from .unified_scheduler import PromptSender, UnifiedScheduler


class SendingPart(PromptSender, Protocol):
    """The prefill role's part: prompts that are computed for decode servers."""

    @property
    def peers(self) -> Peers: ...
    @property
    def idle(self) -> bool: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_transferring(self) -> int: ...
    @property
    def counters(self) -> dict[str, float]: ...
    @property
    def gauges(self) -> dict[str, float]: ...
    def add(self, req: Req) -> None: ...
    def abort(self, req: Req, error: ServingError) -> None: ...
    def poll(self, now: float) -> None: ...
    def register(self) -> None: ...
    def close(self) -> None: ...


class ReceivingPart(Scheduler, Protocol):
    """The decode role's part, which steps the unified scheduler."""

    unified: UnifiedScheduler


class AllPeers:
    """Implements ``common.engine.peers`` with the servers of both sides. The pair key is the current role's."""

    def __init__(self, sending: Peers, receiving: Peers, role: Callable[[], Role]):
        self._sending, self._receiving = sending, receiving
        self._role = role

    @property
    def key(self) -> str | None:
        if self._role().sends_kv:
            return self._sending.key
        return self._receiving.key if self._role().receives_kv else None

    @property
    def busy(self) -> bool:
        return self._receiving.busy

    def connect(self, message: ConnectPeer) -> None:
        self._receiving.connect(message)

    def take_results(self) -> list[Done]:
        return self._receiving.take_results()

    def leave(self) -> None:
        self._sending.leave()
        self._receiving.leave()

    def join(self, model: ModelIdentity, draft: ModelIdentity | None = None) -> None:
        self._sending.join(model, draft)
        self._receiving.join(model, draft)


class SwitchableScheduler:
    """Serves requests of all roles; ``role`` is the name of that which the server has now."""

    def __init__(self, receiving: ReceivingPart, sending: SendingPart, role: str):
        self.unified = receiving.unified
        self.batcher = self.unified.batcher
        self.unified.prompts = sending
        self.role = role
        self.num_switches = 0
        self._receiving, self._sending = receiving, sending
        self.peers = AllPeers(sending.peers, receiving.peers, lambda: ROLES.get(self.role))

    @property
    def idle(self) -> bool:
        return self._receiving.idle and self._sending.idle

    @property
    def paused(self) -> bool:
        return self._receiving.paused

    @property
    def num_running(self) -> int:
        return self._receiving.num_running

    @property
    def num_waiting(self) -> int:
        return self._receiving.num_waiting + self._sending.num_waiting

    @property
    def num_transferring(self) -> int:
        return self._receiving.num_transferring + self._sending.num_transferring

    @property
    def counters(self) -> dict[str, float]:
        return _sums(self._receiving.counters, self._sending.counters) | {"role_switches": self.num_switches}

    @property
    def gauges(self) -> dict[str, float]:
        return _sums(self._receiving.gauges, self._sending.gauges)

    def switch_role(self, role: str) -> None:
        """Serve later requests in ``role``; those that are here keep theirs."""
        self.role = role
        self.num_switches += 1
        if ROLES.get(role).sends_kv:
            self.register()

    def register(self) -> None:
        """Register this rank with the server's bootstrap server."""
        self._sending.register()

    def add(self, req: Req) -> None:
        if not req.sends_kv:
            self._receiving.add(req)
            return
        # This engine computes no further token, and reserves no pages for any.
        req.sampling = replace(req.sampling, max_new_tokens=min(1, req.sampling.max_new_tokens))
        self._sending.add(req)

    def abort(self, req: Req, error: ServingError) -> None:
        (self._sending if req.sends_kv else self._receiving).abort(req, error)

    def step(self, now: float) -> bool:
        self._sending.poll(now)
        return self._receiving.step(now)

    def synchronize(self) -> None:
        self.unified.synchronize()

    def close(self) -> None:
        self._sending.close()
        self._receiving.close()


def make_switchable(unified: UnifiedScheduler, parts: Any, role: str) -> SwitchableScheduler:
    """The scheduler of all roles, from the parts of an engine. The roles' packages are above this one."""
    sending, receiving = (importlib.import_module(facts.rank).make_part(parts, unified) for facts in (
        next(facts for facts in map(ROLES.get, ROLES.names) if facts.sends_kv),
        next(facts for facts in map(ROLES.get, ROLES.names) if facts.receives_kv)))
    return SwitchableScheduler(receiving, sending, role)


def _sums(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    total = Counter(first)
    total.update(second)
    return dict(total)
