"""Connections of a prefill rank to decode servers."""

from __future__ import annotations

from collections.abc import Callable

from ..common.api.errors import InvalidRequest
from ..common.api.identity import ModelIdentity
from ..common.api.messages import ConnectPeer, Done
from ..kvtransfer.protocol.messages import RankInfo
from ..kvtransfer.sender.kv_sender import KVSender
from .retained_prompts import RetainedPrompts


class DecodePeers:
    """Implements ``common.engine.peers`` for prefill. ``register`` registers a rank with the bootstrap server."""

    busy = False

    def __init__(self, sender: KVSender, retained: RetainedPrompts, register: Callable[[RankInfo], None]):
        self._sender = sender
        self._retained = retained
        self._register = register

    @property
    def key(self) -> str:
        return self._sender.key

    def connect(self, message: ConnectPeer) -> None:
        raise InvalidRequest("Only a decode server connects to prefill servers.")

    def take_results(self) -> list[Done]:
        return []

    def leave(self) -> None:
        self._sender.leave()
        self._retained.clear()

    def join(self, model: ModelIdentity, draft: ModelIdentity | None = None) -> None:
        self._sender.join(model, draft)
        self._register(self._sender.info)
