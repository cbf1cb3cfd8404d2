"""What an engine's loop knows of the servers that this one hands KV caches over with."""

from __future__ import annotations

from typing import Protocol

from ..api.errors import InvalidRequest
from ..api.identity import ModelIdentity
from ..api.messages import ConnectPeer, Done


class Peers(Protocol):
    """One rank's. Calls come from the engine's loop."""

    @property
    def key(self) -> str | None:
        """Equal for servers of one role that fit with the same servers of the other; None without peers."""

    @property
    def busy(self) -> bool:
        """Whether ``outcomes`` are awaited."""

    def connect(self, message: ConnectPeer) -> None:
        """Connect to a prefill server before a request needs it; raises InvalidRequest where this is no decode
        server. What comes of it is among the ``outcomes``."""

    def outcomes(self) -> list[Done]:
        """What has come of connections that were asked for, each once."""

    def leave(self) -> None:
        """The weights are about to change: end all sessions, forget prompts that are retained, and let nobody in."""

    def join(self, model: ModelIdentity) -> None:
        """The weights are these now, on all ranks: meet peers again, as another instance."""


class NoPeers:
    """Those of an engine that runs both phases."""

    key = None
    busy = False

    def connect(self, message: ConnectPeer) -> None:
        raise InvalidRequest("Only a decode server connects to prefill servers.")

    def outcomes(self) -> list[Done]:
        return []

    def leave(self) -> None:
        pass

    def join(self, model: ModelIdentity) -> None:
        pass
