"""What a sender knows: its sessions, rooms, destinations and writes, and the effects that its core asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..common.api.errors import ServingError
from . import messages as m
from .checksum import Extent
from .lanes import Lane
from .states import Phase


@dataclass
class Session:
    """One connection from one rank of a receiver; ``lane`` is what of our pages goes there."""

    id: bytes
    info: m.RankInfo
    lane: Lane
    num_pages: int
    confirmed: float
    checksum: Extent = "off"
    peer: Any = None
    lease: float = 0.0  # until when writes may be posted
    rooms: dict[int, SendRoom] = field(default_factory=dict)


@dataclass
class SendRoom:
    room: int
    prompt_digest: int
    num_prompt_tokens: int
    began: float
    deadline: float
    computed: float = 0.0  # when nothing was left to do but to wait for writes
    phase: Phase = Phase.RESERVING
    error: ServingError | None = None
    destinations: tuple[Destination, ...] = ()  # one for each decode rank that has a lane from here
    result: m.PrefillResult | None = None
    queued: int = 0
    in_flight: int = 0
    untaken: set[tuple[bytes, int]] = field(default_factory=set)  # session and stamp of each destination without Taken


@dataclass(eq=False)
class Destination:
    """A Reserve that arrived, and where from. ``checksum`` is of the pages that were written to it so far."""

    session: Session
    room: int
    stamp: int
    prompt_digest: int
    num_prompt_tokens: int
    first_page: int
    page_ids: np.ndarray
    deadline: float
    checksum: int = 0

    @property
    def rank(self) -> int:
        return self.session.info.rank


class Write(NamedTuple):
    """Pages of one layer group on their way, or their parts; to be posted once ``ready`` (a CUDA event or None) has
    happened.

    ``first`` is the place in the prompt of the first of them.
    """

    room: SendRoom
    destination: Destination
    group: int
    first: int
    src_ids: np.ndarray
    dst_ids: np.ndarray
    ready: Any

    @property
    def session(self) -> Session:
        return self.destination.session


class Send(NamedTuple):
    session: bytes
    message: m.ToReceiver


class Admit(NamedTuple):
    """Connect the backend to a new session's memory, then call ``admitted`` or ``rejected``."""

    session: Session
    metadata: bytes


class Dismiss(NamedTuple):
    """Tear down the backend's connection. Its pending writes fail, and must be reported with ``written``."""

    session: Session


Effect = Send | Admit | Dismiss
