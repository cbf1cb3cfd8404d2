"""State of a receiver: its transfers, sessions and lookups, and the effects that its core asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...common.api.errors import DeadlineExceeded, ServingError
from ...common.kvcache.layout import KVLayout
from ..notices import Warn
from ..protocol import messages as m
from ..protocol.states import RECEIVER, Event, Phase, step
from ..protocol.timing import Timing
from .writers import Writers

Address = tuple[str, int]  # host and port of a prefill server's bootstrap server


@dataclass(eq=False)
class RecvTransfer:
    """The receiver's side of one transfer."""

    room: int
    address: Address
    reserve: m.Reserve
    began: float
    phase: Phase = Phase.RESERVING
    error: ServingError | None = None
    result: m.PrefillResult | None = None
    checksum: int = 0  # of the bytes that the senders wrote, by their results
    blocks: tuple[int, ...] = ()  # into which the senders cut our pages, by layer group
    subpages: int = 1  # in one of our pages
    writers: Writers = field(default_factory=Writers)
    dp_rank: int | None = None  # the sender's data-parallel rank; None: chosen by room
    with_draft: bool = False  # the draft's pages are sent, too
    early_results: dict[bytes, m.EarlyResult] = field(default_factory=dict)  # by session, until the flag is set

    def dp_rank_of(self, dp_size: int) -> int:
        """Returns the data-parallel rank, of ``dp_size``, that computes the prompt."""
        return self.room % dp_size if self.dp_rank is None else self.dp_rank

    def publish(self, server: ServerConnection, sessions: list[ReceiverSession]) -> None:
        self.phase = step(RECEIVER, self.phase, Event.PUBLISH)
        self.blocks, self.subpages, self.with_draft = server.blocks, server.subpages, server.with_draft
        for session in sessions:
            session.transfers[self.room] = self
            self.writers.add(session.id, session.instance)

    def accept(self, result: m.PrefillResult, checksum: int = 0) -> None:
        """Stores the result of one of the sender's ranks. Called before DONE, since readers take no lock."""
        self.result = result.merge(self.result)
        self.checksum = (self.checksum + checksum) % 2**64

    def pages_of(self, info: m.RankInfo) -> list[tuple[KVLayout, m.PageSpan]]:
        """Returns our reserved pages in each pool that is written to, with its layout; ``info`` is ours."""
        spans = list(zip(info.layouts, self.reserve.spans))
        if self.with_draft and info.draft is not None:
            spans.append((info.draft.layout, self.reserve.spans[0]))
        return spans

    def take_completed(self, flags: np.ndarray) -> list[tuple[bytes, m.EarlyResult]]:
        """Removes and returns the early results whose completion flags are set, with their sessions."""
        completed = [(session_id, early) for session_id, early in self.early_results.items()
                     if 0 <= early.flag < len(flags) and flags[early.flag] == early.value]
        for session_id, _ in completed:
            del self.early_results[session_id]
        return completed

    def overdue(self, now: float, timing: Timing, reason: str) -> DeadlineExceeded | None:
        """Returns why the transfer must fail now; ``reason`` is why there is no connection to its sender yet."""
        if self.phase is Phase.RESERVING and now >= self.began + timing.bootstrap_timeout:
            return DeadlineExceeded(
                f"decode could not connect to the prefill server at {self.address[0]}:{self.address[1]} within "
                f"{timing.bootstrap_timeout:g} s" + (f": {reason}" if reason else ""))
        if self.phase is Phase.RESERVED and now >= self.began + timing.transfer_timeout:
            return DeadlineExceeded(
                f"the KV cache did not arrive within {timing.transfer_timeout:g} s (--kv-transfer-timeout)")
        return None


@dataclass
class ReceiverSession:
    """Our side of a session: one connection to one sender instance.

    ``welcome`` is set by the sender's Welcome; ``silent`` when the session was given up although its connection exists;
    ``retired`` when another session with the same server has ended: it serves open transfers, and is then closed.
    """

    id: bytes
    address: Address
    instance: str
    heard: float
    last_pong: float
    welcome: bool = False
    silent: bool = False
    retired: bool = False
    dp_rank: int = 0  # the sender's
    transfers: dict[int, RecvTransfer] = field(default_factory=dict)
    completed_early: set[int] = field(default_factory=set)  # stamps of transfers that are DONE before their Result


@dataclass
class ServerConnection:
    """The sessions with all ranks of one prefill server that write to us. They cut our pages into ``blocks``, by layer
    group, and into ``subpages``."""

    sessions: dict[bytes, ReceiverSession]
    blocks: tuple[int, ...] = ()
    subpages: int = 1
    dp_size: int = 1
    with_draft: bool = False  # the draft's pages travel, too

    def sessions_for(self, transfer: RecvTransfer) -> list[ReceiverSession]:
        """Returns the sessions with the data-parallel rank that computes the prompt; none where there is no such
        rank."""
        dp_rank = transfer.dp_rank_of(self.dp_size)
        return [session for session in self.sessions.values() if session.dp_rank == dp_rank]

    @property
    def welcome(self) -> bool:
        return all(session.welcome for session in self.sessions.values())


@dataclass
class LookupState:
    """State of connecting to one sender, from the first lookup to its Welcome; the next try is at ``retry_at``."""

    retry_at: float | None = None
    unreachable_since: float | None = None
    reason: str = ""


@dataclass
class ConnectAttempt:
    """An attempt to connect to a sender before a request needs it: ``done`` without ``error`` means connected."""

    deadline: float
    done: bool = False
    error: ServingError | None = None


class Lookup(NamedTuple):
    """Asks the bootstrap server for its ranks; then ``connect_to_ranks``, ``unreachable``, ``refused`` or
    ``connections.not_registered`` is to be called."""

    address: Address


class Connect(NamedTuple):
    session: ReceiverSession
    endpoint: str


class Send(NamedTuple):
    session: bytes
    message: m.ToSender


class Close(NamedTuple):
    session: bytes


class Verify(NamedTuple):
    """Asks for the checksum of a transfer's pages; then ``verified`` is to be called."""

    transfer: RecvTransfer


Effect = Lookup | Connect | Send | Close | Verify | Warn
