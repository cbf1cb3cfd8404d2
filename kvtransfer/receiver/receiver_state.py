"""What a receiver knows: its rooms, links and searches, and the effects that its core asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...common.api.errors import DeadlineExceeded, ServingError
from ..notices import Warn
from ..protocol import messages as m
from ..protocol.states import RECEIVER, Event, Phase, step
from ..protocol.timing import Timing
from .writers import Writers

Address = tuple[str, int]  # host and port of a prefill server's bootstrap server


@dataclass(eq=False)
class RecvRoom:
    room: int
    address: Address
    reserve: m.Reserve
    began: float
    phase: Phase = Phase.RESERVING
    error: ServingError | None = None
    result: m.PrefillResult | None = None
    checksum: int = 0  # of what the senders say that they wrote
    blocks: tuple[int, ...] = ()  # that they cut our pages into, by layer group
    parts: int = 1  # of our pages, that a page of theirs holds the tokens of
    writers: Writers = field(default_factory=Writers)
    dp_rank: int | None = None  # the sender's data-parallel rank; None: by room
    landings: dict[bytes, m.Landing] = field(default_factory=dict)  # by link, of those that are awaited

    def dp_rank_of(self, dp_size: int) -> int:
        """The data-parallel rank, of ``dp_size``, that computes the prompt."""
        return self.room % dp_size if self.dp_rank is None else self.dp_rank

    def publish(self, route: Route, links: list[Link]) -> None:
        self.phase = step(RECEIVER, self.phase, Event.PUBLISH)
        self.blocks, self.parts = route.blocks, route.parts
        for link in links:
            link.rooms[self.room] = self
            self.writers.add(link.id, link.instance)

    def accept(self, result: m.PrefillResult, checksum: int = 0) -> None:
        """Of one of the sender's ranks; before DONE, since readers take no lock."""
        self.result = result.told_before(self.result)
        self.checksum = (self.checksum + checksum) % 2**64

    def landed(self, bells: np.ndarray) -> list[tuple[bytes, m.Landing]]:
        """The landings that have been rung for since they were awaited, each once."""
        rung = [(link_id, told) for link_id, told in self.landings.items()
                if 0 <= told.place < len(bells) and bells[told.place] == told.value]
        for link_id, _ in rung:
            del self.landings[link_id]
        return rung

    def overdue(self, now: float, timing: Timing, reason: str) -> DeadlineExceeded | None:
        """Why the room must fail now; ``reason`` is why no way to its sender was found yet."""
        if self.phase is Phase.RESERVING and now >= self.began + timing.bootstrap_timeout:
            return DeadlineExceeded(
                f"decode found no way to the prefill server at {self.address[0]}:{self.address[1]} within "
                f"{timing.bootstrap_timeout:g} s" + (f": {reason}" if reason else ""))
        if self.phase is Phase.RESERVED and now >= self.began + timing.transfer_timeout:
            return DeadlineExceeded(
                f"the KV cache did not arrive within {timing.transfer_timeout:g} s (--kv-transfer-timeout)")
        return None


@dataclass
class Link:
    """``welcome`` turns true with the sender's Welcome; ``silent`` when it was given up but its connection stands.
    ``retired`` when another link of its route has ended: it is used for what is under way, and then closed."""

    id: bytes
    address: Address
    instance: str
    heard: float
    last_pong: float
    welcome: bool = False
    silent: bool = False
    retired: bool = False
    dp_rank: int = 0  # that the sender is part of
    rooms: dict[int, RecvRoom] = field(default_factory=dict)
    landed: set[int] = field(default_factory=set)  # stamps of reservations whose last word is still to come


@dataclass
class Route:
    """The links to all ranks of one prefill server that we have lanes from, which cut our pages into ``blocks``
    and ``parts``."""

    links: dict[bytes, Link]
    blocks: tuple[int, ...] = ()
    parts: int = 1
    dp_size: int = 1

    def links_of(self, half: RecvRoom) -> list[Link]:
        """The links to the data-parallel rank that computes the room's prompt; none where there is no such rank."""
        dp_rank = half.dp_rank_of(self.dp_size)
        return [link for link in self.links.values() if link.dp_rank == dp_rank]

    @property
    def welcome(self) -> bool:
        return all(link.welcome for link in self.links.values())


@dataclass
class Search:
    """The way to one sender, from the first look-up to its Welcome; to be tried again at ``retry_at``."""

    retry_at: float | None = None
    unreachable_since: float | None = None
    reason: str = ""


@dataclass
class Trial:
    """A way to a sender that was asked for without a room. ``error``: why there is none; DONE: there is one."""

    deadline: float
    done: bool = False
    error: ServingError | None = None


class Lookup(NamedTuple):
    """Ask the bootstrap server for its ranks; then call ``found``, ``unreachable``, ``refused`` or
    ``ways.not_registered``."""

    address: Address


class Connect(NamedTuple):
    link: Link
    endpoint: str


class Send(NamedTuple):
    link: bytes
    message: m.ToSender


class Close(NamedTuple):
    link: bytes


class Verify(NamedTuple):
    """Compute the checksum of the pages of a room; then call ``verified``."""

    half: RecvRoom


Effect = Lookup | Connect | Send | Close | Verify | Warn
