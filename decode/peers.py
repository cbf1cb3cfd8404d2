"""The prefill servers that a decode rank is connected with."""

from __future__ import annotations

from ..common.api.errors import ServingError
from ..common.api.identity import ModelIdentity
from ..common.api.messages import ConnectPeer, Done
from ..kvtransfer.receiver.kv_receiver import KVReceiver


class PrefillPeers:
    """See ``common.engine.peers``. Each rank of a group connects for itself, and the first tells what came of its own:
    what does not fit with one does not fit with any."""

    def __init__(self, receiver: KVReceiver):
        self._receiver = receiver
        self._asked: dict[tuple[str, int], list[int]] = {}

    @property
    def key(self) -> str:
        return self._receiver.key

    @property
    def busy(self) -> bool:
        return bool(self._asked)

    def connect(self, message: ConnectPeer) -> None:
        address = message.host, message.port
        if address not in self._asked:
            self._receiver.connect(address)
        self._asked.setdefault(address, []).append(message.seq)

    def take_results(self) -> list[Done]:
        found: list[Done] = []
        for address in list(self._asked):
            if (trial := self._receiver.connected(address)) is not None:
                found += [_done(seq, trial.error) for seq in self._asked.pop(address)]
        return found

    def leave(self) -> None:
        self._receiver.leave()

    def join(self, model: ModelIdentity) -> None:
        self._receiver.join(model)


def _done(seq: int, error: ServingError | None) -> Done:
    return Done(seq, "The two servers are connected.") if error is None else Done(seq, error.message, error.wire_code)
