"""Requests whose KV cache is on its way between two servers, one room each.

Each rank of a tensor-parallel group moves its own share of the heads, and a share may fail alone. What a
scheduler acts on is what the whole group agrees on: the least advanced phase, and whether all shares have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from ..common.api.errors import Aborted, ServingError, TransferFailed
from ..common.distributed.agreement import Agreeing
from ..common.request.req import Req
from .protocol.states import Phase


class Transport(Protocol):
    """What KVSender and KVReceiver have in common."""

    def phase(self, room: int) -> Phase: ...

    def error(self, room: int) -> ServingError: ...

    def abort(self, room: int, error: ServingError) -> None: ...

    def forget(self, room: int) -> None: ...


class TransferStatus(Enum):
    """Where a request with a room stands. ``DRAINING``: ended, but a write may still touch its pages."""

    MEETING = "meeting"
    COMPUTING = "computing"
    SENDING = "sending"
    RECEIVING = "receiving"
    DRAINING = "draining"


@dataclass
class TransferRequest:
    """This server's half of one attempt."""

    req: Req
    room: int
    stage: TransferStatus
    number: int = 0  # of this half among all that this rank has opened


@dataclass(frozen=True)
class Progress:
    """What the group agrees on: ``phase`` is the least advanced rank's, ``settled`` that all ranks have ended.

    ``aborted``: a rank knows that the client has left, so that no other attempt will come.
    """

    half: TransferRequest
    phase: Phase
    settled: bool
    aborted: bool = False

    @property
    def failing(self) -> bool:
        return self.phase <= Phase.ABORTING


class TransferTable:
    """The halves that are open on this rank, by room. Every rank of the group holds equal ones, in equal order.

    Not by request id: a client's own comes again with its next attempt, while this one's pages still drain.
    """

    def __init__(self, transport: Transport, group: Agreeing):
        self._transport = transport
        self._group = group
        self._halves: dict[int, TransferRequest] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._halves)

    def __iter__(self) -> Iterator[TransferRequest]:
        return iter(self._halves.values())

    def count(self, stage: TransferStatus) -> int:
        return sum(half.stage is stage for half in self)

    def open(self, req: Req, stage: TransferStatus) -> TransferRequest:
        """``req``'s room is the transport's since it was told of it, and so free here."""
        assert req.bootstrap is not None and req.bootstrap.room not in self._halves
        half = self._halves[req.bootstrap.room] = TransferRequest(req, req.bootstrap.room, stage, next(self._numbers))
        return half

    def of(self, req: Req) -> TransferRequest | None:
        half = None if req.bootstrap is None else self._halves.get(req.bootstrap.room)
        return half if half is not None and half.req is req else None

    def poll(self) -> list[Progress]:
        """The group's view of every half, in order of opening."""
        if not self._halves:
            return []
        halves = list(self)
        agreed = self._group.least("rooms", [half.number for half in halves],
                                   np.array([self._standing(half) for half in halves], np.int64),
                                   (Phase.RESERVING, False, True))
        return [Progress(half, Phase(phase), bool(settled), not wanted)
                for half, (phase, settled, wanted) in zip(halves, agreed)]

    def _standing(self, half: TransferRequest) -> tuple[Phase, bool, bool]:
        """This rank's phase, whether it is the last, and whether the client is still there as far as it knows."""
        phase = self._transport.phase(half.room)
        left = phase <= Phase.ABORTING and isinstance(self._transport.error(half.room), Aborted)
        return phase, phase.terminal, not left

    def abort(self, half: TransferRequest, error: ServingError) -> None:
        """Stop this half on every rank; its pages stay held until the transfer has settled."""
        half.stage = TransferStatus.DRAINING
        self._transport.abort(half.room, error)

    def error_of(self, half: TransferRequest) -> ServingError:
        """Why the half fails: this rank's own reason, or that another rank has one."""
        if self._transport.phase(half.room) <= Phase.ABORTING:
            return self._transport.error(half.room)
        return TransferFailed("The KV cache transfer failed on another rank of the server.", cause="other_rank")

    def close(self, half: TransferRequest, forget: Callable[[int], None] | None = None) -> None:
        """``forget``: in place of the transport's."""
        del self._halves[half.room]
        (forget or self._transport.forget)(half.room)
