"""Peers: the servers that this one transfers KV caches to or from, as the engine's loop sees them."""

from __future__ import annotations

from typing import Protocol

from ..api.errors import InvalidRequest
from ..api.identity import ModelIdentity
from ..api.messages import ConnectPeer, Done


class Peers(Protocol):
    """Peers of one rank. Called from the engine's loop."""

    @property
    def key(self) -> str | None:
        """Pair key, equal for servers of one role that are compatible with the same servers of the other; None without
        peers."""

    @property
    def busy(self) -> bool:
        """True while ``take_results`` will return more."""

    def connect(self, message: ConnectPeer) -> None:
        """Connect to a prefill server before a request needs it; raises InvalidRequest where this is no decode
        server. ``take_results`` returns the result later."""

    def take_results(self) -> list[Done]:
        """Results of requested connections, each once."""

    def leave(self) -> None:
        """End all sessions, drop retained prompts and accept no peer, because the weights are about to change."""

    def join(self, model: ModelIdentity, draft: ModelIdentity | None = None) -> None:
        """Accept peers again, as another instance, with the weights that all ranks have now, the draft model's too."""


class NoPeers:
    """Peers of an engine that runs both phases: none."""

    key = None
    busy = False

    def connect(self, message: ConnectPeer) -> None:
        raise InvalidRequest("Only a decode server connects to prefill servers.")

    def take_results(self) -> list[Done]:
        return []

    def leave(self) -> None:
        pass

    def join(self, model: ModelIdentity, draft: ModelIdentity | None = None) -> None:
        pass
