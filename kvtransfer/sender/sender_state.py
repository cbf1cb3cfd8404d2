"""State of a sender: its sessions, transfers, destinations and writes, and the effects that its core asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...common.api.errors import ServingError
from ...common.kvcache.layout import KVLayout
from ..notices import Warn
from ..protocol import messages as m
from ..protocol.messages import Extent
from ..protocol.reshard import ReshardPlan
from ..protocol.states import SENDER, Event, Phase, step


@dataclass
class Session:
    """A connection from one rank of a receiver; ``plan`` says which bytes of our pages it gets."""

    id: bytes
    info: m.RankInfo
    plan: ReshardPlan
    pools: list[m.FurtherPool]  # the receiver's, of all cache groups
    confirmed: float
    checksum: Extent = "off"
    peer: Any = None
    lease: float = 0.0  # time until which writes may be posted
    stamp: int = -1  # the last Reserve's
    transfers: dict[int, SendTransfer] = field(default_factory=dict)

    @property
    def pools_with_layouts(self) -> list[tuple[m.FurtherPool, KVLayout]]:
        """The receiver's pools that it gets pages in: of its cache groups, and the draft's after them."""
        pools = list(zip(self.pools, self.info.layouts))
        return pools if self.info.draft is None else [*pools, (self.pools[0], self.info.draft.layout)]

    def confirm(self, sent: float, now: float, lease: float) -> None:
        """Records the Pong to a Ping of time ``sent``, from which writes may be posted for ``lease`` seconds."""
        sent = min(sent, now)
        self.confirmed = max(self.confirmed, sent)
        self.lease = max(self.lease, sent + lease)


@dataclass
class SendTransfer:
    """The sender's side of one transfer."""

    room: int
    prompt_digest: int
    num_prompt_tokens: int
    began: float
    deadline: float
    computed: float = 0.0  # time from which only writes were waited for
    phase: Phase = Phase.RESERVING
    error: ServingError | None = None
    destinations: tuple[Destination, ...] = ()  # one for each decode rank that this rank writes to
    result: m.PrefillResult | None = None
    queued: int = 0
    in_flight: int = 0
    early_result_sent: bool = False
    # session and stamp of each destination whose first-token acknowledgement has not come
    unacknowledged: set[tuple[bytes, int]] = field(default_factory=set)

    def find_difference(self, destination: Destination) -> str | None:
        """Explains why the destination is for another prompt than this one; None where it is for this one."""
        ours, theirs = self.num_prompt_tokens, destination.num_prompt_tokens
        if (self.prompt_digest, ours) == (destination.prompt_digest, theirs):
            return None
        return (f"prefill and decode read different prompts ({ours} and {theirs} tokens); both need the same "
                f"tokenizer, chat template and request")

    def join(self, destinations: list[Destination]) -> None:
        self.destinations = tuple(destinations)
        for destination in destinations:
            destination.session.transfers[self.room] = self
            self.unacknowledged.add((destination.session.id, destination.stamp))
        self.phase = step(SENDER, self.phase, Event.JOIN)


class DestinationPages(NamedTuple):
    """The receiver's pages ``page_ids [n]`` for a prompt's pages from ``first_page`` on, in one cache group."""

    first_page: int
    page_ids: np.ndarray

    @classmethod
    def of(cls, span: m.PageSpan) -> DestinationPages:
        try:
            return cls(span.first_page, m.unpack_page_ids(span.page_ids))
        except ValueError:
            return cls(span.first_page, np.empty(0, dtype=np.int64))


@dataclass(eq=False)
class Destination:
    """A Reserve that arrived, with its session. ``pages`` are those of each cache group. ``checksum`` covers the pages
    that were written to it so far."""

    session: Session
    room: int
    stamp: int
    prompt_digest: int
    num_prompt_tokens: int
    pages: list[DestinationPages]
    deadline: float
    checksum: int = 0

    @classmethod
    def of(cls, session: Session, reserve: m.Reserve, deadline: float) -> Destination:
        return cls(session, reserve.room, reserve.stamp, reserve.prompt_digest, reserve.num_prompt_tokens,
                   list(map(DestinationPages.of, reserve.spans)), deadline)

    @property
    def first_page(self) -> int:
        """The first page of the prompt that the receiver lacks in the first cache group."""
        return self.pages[0].first_page

    @property
    def rank(self) -> int:
        return self.session.info.rank

    @property
    def flaw(self) -> str | None:
        """Explains why nothing can be written there: the number of pages is wrong, or some are not in the receiver's
        pool; None where it can."""
        pages, pools = self.session.info.layout.pages_for(self.num_prompt_tokens), self.session.pools
        if len(self.pages) != len(pools):
            return f"decode's reservation is for {len(self.pages)} cache groups, and it has {len(pools)}"
        for (first, ids), pool in zip(self.pages, pools):
            if not 0 <= first <= pages or len(ids) != pages - first:
                return f"decode's reservation has {len(ids)} pages from page {first} on for a prompt of {pages} pages"
            if len(ids) and (ids.min() < 0 or ids.max() >= pool.num_pages):
                return f"decode's reservation names pages outside its pool of {pool.num_pages}"
        return None


class Write(NamedTuple):
    """Pages (or sub-pages) of one layer group to be written to one destination.

    It may be posted once ``ready``, a CUDA event or None, has happened. ``first`` is the index in the prompt of the
    first of them.
    """

    transfer: SendTransfer
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
    """Asks to connect the backend to a new session's memory, then to call ``admitted`` or ``rejected``."""

    session: Session
    metadata: bytes


class Dismiss(NamedTuple):
    """Asks to tear down the backend's connection. Its pending writes fail, and must be reported with ``written``."""

    session: Session


Effect = Send | Admit | Dismiss | Warn
