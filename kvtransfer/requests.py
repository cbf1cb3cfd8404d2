"""Requests whose KV cache is transferred between two servers, by bootstrap room, as their scheduler sees them.

Each rank of a tensor-parallel group transfers its own heads, and a rank may fail alone. A scheduler acts on what the
whole group agrees on: the least advanced phase, and whether the transfers of all ranks have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ..common.api.errors import Aborted, ServingError, TransferFailed
from ..common.distributed.agreement import RankAgreement
from ..common.request.req import Req
from .protocol.states import Phase


class Transport(Protocol):
    """Common interface of KVSender and KVReceiver."""

    def phase(self, room: int) -> Phase: ...

    def error(self, room: int) -> ServingError: ...

    def abort(self, room: int, error: ServingError) -> None: ...

    def forget(self, room: int) -> None: ...


class TransferStatus(Enum):
    """Status of a request with a transfer, which its scheduler sets; equal on all ranks of a group.

    The ``Phase`` of states.py is each rank's own and follows the protocol's messages. The status follows the phases
    that the group agrees on: a prefill request is BOOTSTRAPPING until all ranks are RESERVED, then COMPUTING, then
    SENDING until all are DONE; a decode request is RECEIVING until all are DONE. A request whose transfer fails, or
    whose client leaves, is DRAINING from the first rank's failure until all ranks are terminal: a write may still touch
    its pages.
    """

    BOOTSTRAPPING = "bootstrapping"
    COMPUTING = "computing"
    SENDING = "sending"
    RECEIVING = "receiving"
    DRAINING = "draining"


FOLLOWERS: Mapping[TransferStatus, frozenset[TransferStatus]] = {
    TransferStatus.BOOTSTRAPPING: frozenset((TransferStatus.COMPUTING, TransferStatus.DRAINING)),
    TransferStatus.COMPUTING: frozenset((TransferStatus.SENDING, TransferStatus.DRAINING)),
    TransferStatus.SENDING: frozenset((TransferStatus.DRAINING,)),
    TransferStatus.RECEIVING: frozenset((TransferStatus.DRAINING,)),
    TransferStatus.DRAINING: frozenset((TransferStatus.DRAINING,)),  # aborted again
}


@dataclass
class TransferRequest:
    """A request and its transfer, on this server's side."""

    req: Req
    room: int
    status: TransferStatus
    number: int = 0  # counts the transfers that this rank has opened

    def advance(self, status: TransferStatus) -> None:
        assert status in FOLLOWERS[self.status], f"{status.name} after {self.status.name}"
        self.status = status


@dataclass(frozen=True)
class Progress:
    """State that the group agrees on: ``phase`` is the least advanced rank's, ``settled`` that all ranks have ended.

    ``aborted``: a rank knows that the client has disconnected, so that no other attempt will come.
    """

    transfer: TransferRequest
    phase: Phase
    settled: bool
    aborted: bool = False

    @property
    def failing(self) -> bool:
        return self.phase <= Phase.ABORTING


class TransferTable:
    """The open transfers of this rank, by bootstrap room. All ranks of the group have the same ones, in the same order.

    They are not kept by request id: the next attempt has the same id, while this one's pages still drain.
    """

    def __init__(self, transport: Transport, group: RankAgreement, topic: str = "transfers"):
        """``topic`` names the transfers in the group's agreement, which may have another table's, too."""
        self._transport = transport
        self._group = group
        self._topic = topic
        self._transfers: dict[int, TransferRequest] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._transfers)

    def __iter__(self) -> Iterator[TransferRequest]:
        return iter(self._transfers.values())

    def count(self, status: TransferStatus) -> int:
        return sum(transfer.status is status for transfer in self)

    def open(self, req: Req, status: TransferStatus) -> TransferRequest:
        """Adds the request. Its room is free here, since the transport has accepted it."""
        assert req.bootstrap is not None and req.bootstrap.room not in self._transfers
        transfer = self._transfers[req.bootstrap.room] = TransferRequest(req, req.bootstrap.room, status,
                                                                         next(self._numbers))
        return transfer

    def find(self, req: Req) -> TransferRequest | None:
        transfer = None if req.bootstrap is None else self._transfers.get(req.bootstrap.room)
        return transfer if transfer is not None and transfer.req is req else None

    def poll(self) -> list[Progress]:
        """Returns the group's state of every transfer, in order of opening."""
        if not self._transfers:
            return []
        transfers = list(self)
        agreed = self._group.min_by_key(self._topic, [transfer.number for transfer in transfers], self._local_states,
                                        (Phase.RESERVING, False, True))
        return [Progress(transfer, Phase(phase), bool(settled), not connected)
                for transfer, (phase, settled, connected) in zip(transfers, agreed)]

    def _local_states(self) -> dict[int, tuple[int, ...]]:
        return {transfer.number: self._local_state(transfer) for transfer in self}

    def _local_state(self, transfer: TransferRequest) -> tuple[Phase, bool, bool]:
        """Returns this rank's phase, whether it is final, and False where the client is known to have disconnected."""
        phase = self._transport.phase(transfer.room)
        aborted = phase <= Phase.ABORTING and isinstance(self._transport.error(transfer.room), Aborted)
        return phase, phase.terminal, not aborted

    def abort(self, transfer: TransferRequest, error: ServingError) -> None:
        """Stops the transfer on every rank; its pages stay allocated until it has settled."""
        transfer.advance(TransferStatus.DRAINING)
        self._transport.abort(transfer.room, error)

    def error_for(self, transfer: TransferRequest) -> ServingError:
        """Returns why the transfer fails: this rank's own error, or that another rank failed."""
        if self._transport.phase(transfer.room) <= Phase.ABORTING:
            return self._transport.error(transfer.room)
        return TransferFailed("The KV cache transfer failed on another rank of the server.", cause="other_rank")

    def close(self, transfer: TransferRequest, forget: Callable[[int], None] | None = None) -> None:
        """Removes the transfer, and drops it in the transport by ``forget`` (by default the transport's)."""
        del self._transfers[transfer.room]
        (forget or self._transport.forget)(transfer.room)
