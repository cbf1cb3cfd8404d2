"""Connections of a decode rank to prefill servers."""

from __future__ import annotations

from ..common.api.errors import ServingError
from ..common.api.identity import ModelIdentity
from ..common.api.messages import ConnectPeer, Done
from ..kvtransfer.receiver.kv_receiver import KVReceiver


class PrefillPeers:
    """Implements ``common.engine.peers`` for decode. Each rank of a group connects on its own, and the first reports
    the outcome: what does not match one rank does not match any."""

    def __init__(self, receiver: KVReceiver):
        self._receiver = receiver
        self._requests: dict[tuple[str, int], list[int]] = {}

    @property
    def key(self) -> str:
        return self._receiver.key

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def connect(self, message: ConnectPeer) -> None:
        address = message.host, message.port
        if address not in self._requests:
            self._receiver.connect(address)
        self._requests.setdefault(address, []).append(message.seq)

    def take_results(self) -> list[Done]:
        outcomes: list[Done] = []
        for address in list(self._requests):
            if (attempt := self._receiver.connected(address)) is not None:
                outcomes += [_done(seq, attempt.error) for seq in self._requests.pop(address)]
        return outcomes

    def leave(self) -> None:
        self._receiver.leave()

    def join(self, model: ModelIdentity, draft: ModelIdentity | None = None) -> None:
        self._receiver.join(model, draft)


def _done(seq: int, error: ServingError | None) -> Done:
    return Done(seq, "The two servers are connected.") if error is None else Done(seq, error.message, error.wire_code)
