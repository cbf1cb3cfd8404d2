"""The control channel's messages: msgpack, tagged, bounded; one message a frame.

A receiver's DEALER socket is a *session*: it has a fresh random identity, never reconnects, and begins with Hello.
Within a session ZMQ neither reorders nor duplicates; a broken session is never continued, so a lost message
means a lost session. ``stamp`` is the receiver's number of one reservation, unique within its instance and greater than
all before: it distinguishes this use of a bootstrap room from earlier ones, and a repeated Reserve from a new one.
``instance`` is a process's random id (its epoch).

    receiver                                   sender
    Hello(identity, memory metadata)     ->
                                         <-    Welcome, or Refused(why)
    Reserve(room, stamp, destination)    ->                                (after Welcome; any number)
                                         <-    EarlyResult(room, stamp, flag)   every write is in flight
                                         <-    Result(room, stamp)         every write is complete
    FirstTokenAck(room, stamp)           ->                                the first token is on its way to the client
    Decline(room, error)                 ->                                it will not reserve for this room
    Abort(room, stamp, error)            ->    or   <-   Abort(room, stamp, error)
                                         <-    Stopped(room, stamp)        answers each Abort, once writes have drained
    Pong(time)                           ->    <-   Ping(time)             the lease, see sessions.py
    Bye                                  ->    <-   Gone(why)              the session has ended

History: version 1 is the first. Version 2 adds message authentication (authentication.py), checksums (checksum.py) and
reshard plans (reshard.py): a decode rank has sessions with all prefill ranks that write to it, reserves with each, and
waits for the result of each. Version 3 adds FirstTokenAck, until which prefill retains what another attempt at the
request would need, and Decline. EarlyResult is sent only to peers whose memory has completion flags, which know the
message. A server with several cache groups names the further ones in fields that an older peer ignores: it finds fewer
layers than it expects, and refuses. A prefill server may have pipeline stages: each of its ranks then has some of the
layers, which an older peer refuses by their number. A server whose weights were replaced is another instance with
another model. A server with a draft model says so in a field that an older peer ignores: its pages then do not travel.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Annotated, Literal

import msgspec
import numpy as np

from ...common.api import errors
from ...common.api.drafts import Drafts
from ...common.api.identity import ModelIdentity
from ...common.api.messages import LoadedTokens, Logprobs
from ...common.kvcache.layout import KVLayout
from .reshard import RankLayout, find_group_mismatch, find_mismatch

Extent = Literal["sampled", "full", "off"]
"""The share of the transferred pages that a checksum covers."""

PROTOCOL = 3
_NumRanks = Annotated[int, msgspec.Meta(ge=1, le=4096)]

MAX_MESSAGE_BYTES = 64 << 20
"""The largest message is the result of a prompt of 128K tokens with 20 alternatives for each: about 40 MiB."""


class PrefillResult(msgspec.Struct, frozen=True):
    """Result of a prompt's computation: the first token, and how much of the prompt prefill had cached.

    ``hidden_states`` are the prompt's, as float32 rows, where the request asks for them: 32 MiB at most, and so are
    ``routed_experts``, as uint16. ``drafts``:
    what may follow the first token, where the prefill server drafts. ``loaded``: of the cached tokens, where a tier of
    the prefill server had any.
    """

    token_id: int
    num_cached_tokens: int
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    hidden_states: bytes | None = None
    routed_experts: bytes | None = None
    drafts: Drafts | None = None
    loaded: LoadedTokens | None = None

    def merge(self, other: PrefillResult | None) -> PrefillResult:
        """Returns the result that has log-probabilities of the token, which only one of the ranks reports."""
        return self if other is None or other.logprobs is None else other


class DraftInfo(msgspec.Struct, frozen=True):
    """The draft model of a server, and the layout of its pool on this rank, whose pages have the ids of the first cache
    group's. ``required``: a decode server with it needs its pages from prefill, because it reads the model's hidden
    states; else it can compute a prompt with it by itself."""

    algorithm: str
    model: ModelIdentity
    layout: KVLayout
    required: bool = True

    def mismatch(self, tp_size: int, peer: DraftInfo | None, peer_tp_size: int) -> str | None:
        """Names what keeps its pages from travelling from ``peer``, prefill's, to us; None where nothing does."""
        if peer is None:
            return (f"drafts are made by {self.algorithm} here and by no draft model there: give the prefill server "
                    f"the same --speculative-algorithm and draft model")
        if self.algorithm != peer.algorithm:
            return f"--speculative-algorithm is {self.algorithm} here and {peer.algorithm} there"
        if self.model.fingerprint != peer.model.fingerprint:
            return f"the draft model is {self.model} here and {peer.model} there"
        why = find_mismatch(RankLayout(peer_tp_size, peer.layout), RankLayout(tp_size, self.layout))
        return None if why is None else f"of the draft model {why}"


class RankInfo(msgspec.Struct, frozen=True):
    """Description of one rank of a server instance for its peers. Receivers have no ``endpoint``.

    ``layout`` is that of the first cache group, ``further_layouts`` are those of the others, if there are any.
    ``rank`` of ``tp_size`` is its rank in its attention group, which is data-parallel rank ``dp_rank`` of ``dp_size``,
    or pipeline stage ``pp_rank`` of ``pp_size``, whose layers are in ``layout``. ``model`` is None for a peer that does
    not send it; ``server`` is its name in logs. ``deterministic``: its rows do not depend on
    their batch. ``page_server``: where other ranks read the pages of its host memory, "" where they cannot.
    """

    instance: str
    endpoint: str
    rank: int
    tp_size: _NumRanks
    layout: KVLayout
    backend: str
    protocol: int = PROTOCOL
    dp_rank: int = 0
    dp_size: _NumRanks = 1
    pp_rank: int = 0
    pp_size: _NumRanks = 1
    model: ModelIdentity | None = None
    server: str = ""
    further_layouts: tuple[KVLayout, ...] = ()
    draft: DraftInfo | None = None
    deterministic: bool = False
    page_server: str = ""

    def __post_init__(self) -> None:
        ranks = ((self.rank, self.tp_size), (self.dp_rank, self.dp_size), (self.pp_rank, self.pp_size))
        if any(not 0 <= rank < size for rank, size in ranks):
            raise ValueError("a rank lies outside of its group")
        drafts = () if self.draft is None else (self.draft.layout,)
        if any(layout.page_size != self.layout.page_size for layout in (*self.further_layouts, *drafts)):
            raise ValueError("cache groups have pages of different numbers of tokens")

    def mismatch(self, peer: RankInfo) -> str | None:
        """Names what keeps pages from travelling from ``peer`` to us, with both values; None where nothing does."""
        for name in ("protocol", "backend"):
            ours, theirs = getattr(self, name), getattr(peer, name)
            if ours != theirs:
                return f"{name} is {ours!r} here and {theirs!r} there"
        mine, its = self.model, peer.model
        if mine is not None and its is not None and mine.fingerprint != its.fingerprint:
            return f"the model is {mine} here and {its} there"
        if self.deterministic != peer.deterministic:
            ours, theirs = ("on" if one.deterministic else "off" for one in (self, peer))
            return f"--enable-deterministic-inference is {ours} here and {theirs} there"
        if (why := find_group_mismatch(peer.group_layouts, self.group_layouts)) is not None:
            return why
        return self._draft_mismatch(peer) if self.draft is not None and self.draft.required else None

    def _draft_mismatch(self, peer: RankInfo) -> str | None:
        assert self.draft is not None
        return self.draft.mismatch(self.tp_size, peer.draft, peer.tp_size)

    def takes_draft_from(self, peer: RankInfo) -> bool:
        """True where the draft's pages travel from ``peer`` to us, who match."""
        return self.draft is not None and self._draft_mismatch(peer) is None

    @property
    def layouts(self) -> tuple[KVLayout, ...]:
        """The layouts of all cache groups."""
        return self.layout, *self.further_layouts

    def cache_group_of(self, layer_group: int) -> int:
        """Returns the cache group whose pages a layer group has. These are numbered one cache group after the other,
        and the draft's, which has the first one's pages, after all of them."""
        ends = accumulate(len(layout.groups) for layout in self.layouts)
        return next((index for index, end in enumerate(ends) if layer_group < end), 0)

    @property
    def group_layouts(self) -> list[RankLayout]:
        return [RankLayout(self.tp_size, layout) for layout in self.layouts]


class FurtherPool(msgspec.Struct, frozen=True, array_like=True):
    """The pool of a cache group after the first; the fields as in Hello."""

    num_pages: int
    spare_page: int | None


class PageSpan(msgspec.Struct, frozen=True, array_like=True):
    """Pages of a prompt in one cache group, from ``first_page`` on; ``page_ids`` int32, little endian."""

    first_page: int
    page_ids: bytes


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """``expected`` is the sender's instance that the bootstrap server named; ``metadata`` is the backend's own.

    ``checksum`` says which words of its pages each result must be accompanied by a checksum of. ``spare_page`` is one
    that no request uses: a write to it opens the data path before the first request.
    """

    info: RankInfo
    expected: str
    num_pages: int
    metadata: bytes
    checksum: Extent = "off"
    spare_page: int | None = None
    further_pools: tuple[FurtherPool, ...] = ()

    @property
    def pools(self) -> list[FurtherPool]:
        """The pools of all cache groups."""
        return [FurtherPool(self.num_pages, self.spare_page), *self.further_pools]


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    instance: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """``restarted``: the sender is another instance than expected; ask the bootstrap server again. ``unfit``: the two
    servers never match."""

    message: str
    restarted: bool = False
    unfit: bool = False


class Reserve(msgspec.Struct, tag="reserve", frozen=True):
    """A destination: ``page_ids`` (int32, little endian) receive the prompt's pages from ``first_page`` on, and
    ``further`` those of the other cache groups."""

    room: int
    stamp: int
    prompt_digest: int
    num_prompt_tokens: int
    first_page: int
    page_ids: bytes
    further: tuple[PageSpan, ...] = ()

    @property
    def spans(self) -> list[PageSpan]:
        """The pages of all cache groups."""
        return [PageSpan(self.first_page, self.page_ids), *self.further]


class Result(msgspec.Struct, tag="result", frozen=True):
    room: int
    stamp: int
    instance: str
    result: PrefillResult
    checksum: int = 0


class EarlyResult(msgspec.Struct, tag="landing", frozen=True):
    """An early result, ahead of its pages: they have arrived when the receiver's completion flag number ``flag`` has
    ``value``. The sender writes ``value`` to no other flag, and sends the Result all the same."""

    room: int
    stamp: int
    instance: str
    result: PrefillResult
    flag: int = msgspec.field(name="place")
    value: int


class FirstTokenAck(msgspec.Struct, tag="taken", frozen=True):
    """Acknowledges the first token: it is on its way to the client, so no other attempt will need the prompt."""

    room: int
    stamp: int


def _error_of_peer(code: str, message: str) -> errors.ServingError:
    """Returns the error with which the peer ended a transfer."""
    error = errors.from_code(code, message)
    return errors.PeerFailed(message, code=error.code) if type(error) is errors.ServingError else error


class Decline(msgspec.Struct, tag="decline", frozen=True):
    room: int
    code: str
    message: str

    @property
    def error(self) -> errors.ServingError:
        return _error_of_peer(self.code, self.message)


class Abort(msgspec.Struct, tag="abort", frozen=True):
    room: int
    stamp: int
    code: str
    message: str

    @property
    def error(self) -> errors.ServingError:
        return _error_of_peer(self.code, self.message)


class Stopped(msgspec.Struct, tag="stopped", frozen=True):
    room: int
    stamp: int


class Ping(msgspec.Struct, tag="ping", frozen=True):
    time: float


class Pong(msgspec.Struct, tag="pong", frozen=True):
    time: float


class Bye(msgspec.Struct, tag="bye", frozen=True):
    pass


class Gone(msgspec.Struct, tag="gone", frozen=True):
    message: str


def pair_layouts(prefill: RankInfo, decode: RankInfo) -> tuple[list[RankLayout], list[RankLayout]]:
    """Returns the layouts of the pools of two servers that match between which pages travel: those of their cache
    groups, and the draft's."""
    ours, theirs = prefill.group_layouts, decode.group_layouts
    if decode.takes_draft_from(prefill):
        assert prefill.draft is not None and decode.draft is not None
        ours.append(RankLayout(prefill.tp_size, prefill.draft.layout))
        theirs.append(RankLayout(decode.tp_size, decode.draft.layout))
    return ours, theirs


def describe_mismatch(why: str) -> str:
    """Returns a sentence for the result of a decode rank's ``RankInfo.mismatch``."""
    return f"prefill and decode do not fit together: {why} (decode, prefill)"


ToSender = Hello | Reserve | Decline | FirstTokenAck | Abort | Pong | Bye
ToReceiver = Welcome | Refused | EarlyResult | Result | Abort | Stopped | Ping | Gone

encode = msgspec.msgpack.Encoder().encode
decode_to_sender: Callable[[bytes], ToSender] = msgspec.msgpack.Decoder(ToSender).decode
decode_to_receiver: Callable[[bytes], ToReceiver] = msgspec.msgpack.Decoder(ToReceiver).decode
"""Both raise one of ``UNREADABLE`` on anything else."""


def pack_page_ids(page_ids: np.ndarray) -> bytes:
    """Packs ``page_ids [n]`` as int32, little endian."""
    return np.ascontiguousarray(page_ids, dtype="<i4").tobytes()


def unpack_page_ids(packed: bytes) -> np.ndarray:
    """Unpacks ``[num_pages]`` int64. Raises ValueError where the length is no multiple of 4."""
    return np.frombuffer(packed, dtype="<i4").astype(np.int64)
