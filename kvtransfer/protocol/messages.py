"""The control channel's messages: msgpack, tagged, bounded; one message a frame.

A receiver's DEALER socket is a *session*: it has a fresh random identity, never reconnects, and begins with Hello.
Within a session ZMQ neither reorders nor duplicates; a broken session is never continued, so a lost message
means a lost session. ``stamp`` is the receiver's number of one reservation, unique within its instance and greater than
all before, so that it tells this use of a room from every earlier one, and a Reserve that comes again from a new one;
``instance`` is a process's random id (its epoch).

    receiver                                   sender
    Hello(who, where its memory is)      ->
                                         <-    Welcome, or Refused(why)
    Reserve(room, stamp, destination)    ->                                (after Welcome; any number)
                                         <-    Landing(room, stamp, bell)  every write is on its way
                                         <-    Result(room, stamp)         every write is complete
    Taken(room, stamp)                   ->                                the first token is on its way to the client
    Decline(room, error)                 ->                                it will not reserve for this room
    Abort(room, stamp, error)            ->    or   <-   Abort(room, stamp, error)
                                         <-    Stopped(room, stamp)        answers each Abort, once writing has ended
    Pong(time)                           ->    <-   Ping(time)             the lease, see sessions.py
    Bye                                  ->    <-   Gone(why)              the session has ended

History: version 1 is the first. Version 2 has seals (seal.py), checksums (checksum.py) and lanes
(lanes.py): a decode rank has sessions with all prefill ranks that it has lanes from, reserves with each, and waits for
the result of each. Version 3 has Taken, until which prefill keeps what another attempt at the request would need, and
Decline. Landing is sent only to peers whose memory has bells, which know it. A prefill server may
have stages: its ranks then have some of the layers each, which an older peer refuses by their number. A server whose
weights were replaced is another instance, and tells another model.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np

from ...common.api import errors
from ...common.api.identity import ModelIdentity
from ...common.api.messages import Logprobs
from ...common.kvcache.layout import KVLayout
from .reshard import RankLayout, why_not

Extent = Literal["sampled", "full", "off"]
"""How much of the transferred pages a checksum covers."""

PROTOCOL = 3
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=4096)]
# The largest message is the result of a 128K-token prompt with 20 alternatives a token: about 40 MiB.
MAX_MESSAGE_BYTES = 64 << 20


class PrefillResult(msgspec.Struct, frozen=True):
    """What decode needs beside the pages: the first token, and how much of the prompt prefill had cached.

    ``hidden_states`` are the prompt's, float32 rows, where the request wants them: 32 MiB at most.
    """

    token_id: int
    num_cached_tokens: int
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    hidden_states: bytes | None = None

    def told_before(self, other: PrefillResult | None) -> PrefillResult:
        """Of the results of two ranks the one that tells more: log-probabilities of the token come from one rank."""
        return self if other is None or other.logprobs is None else other


class RankInfo(msgspec.Struct, frozen=True):
    """One rank of one server instance, as its peers need to know it. Receivers have no ``endpoint``.

    ``rank`` of ``tp_size`` is its place in its attention group, which is data-parallel rank ``dp_rank`` of ``dp_size``,
    or stage ``pp_rank`` of ``pp_size``, whose layers the layout tells. ``model`` is None of a peer that does not
    tell it; ``server`` is what logs call it.
    """

    instance: str
    endpoint: str
    rank: int
    tp_size: _Ranks
    layout: KVLayout
    backend: str
    protocol: int = PROTOCOL
    dp_rank: int = 0
    dp_size: _Ranks = 1
    pp_rank: int = 0
    pp_size: _Ranks = 1
    model: ModelIdentity | None = None
    server: str = ""

    def __post_init__(self) -> None:
        places = ((self.rank, self.tp_size), (self.dp_rank, self.dp_size), (self.pp_rank, self.pp_size))
        if any(not 0 <= rank < size for rank, size in places):
            raise ValueError("a rank lies outside of its group")

    def mismatch(self, peer: RankInfo) -> str | None:
        """Why pages cannot travel from ``peer`` to us, as the name and both values of what differs; None: they can."""
        for name in ("protocol", "backend"):
            ours, theirs = getattr(self, name), getattr(peer, name)
            if ours != theirs:
                return f"{name} is {ours!r} here and {theirs!r} there"
        mine, its = self.model, peer.model
        if mine is not None and its is not None and mine.fingerprint != its.fingerprint:
            return f"the model is {mine} here and {its} there"
        return why_not(peer.side, self.side)

    @property
    def side(self) -> RankLayout:
        return RankLayout(self.tp_size, self.layout)


class Hello(msgspec.Struct, tag="hello", frozen=True):
    """``expected`` is the sender's instance that the receiver was told of; ``metadata`` the backend's own.

    ``checksum`` says which words of its pages each result must be accompanied by a checksum of. ``spare_page`` is one
    that nobody reads: what is written there opens the data path before the first request.
    """

    info: RankInfo
    expected: str
    num_pages: int
    metadata: bytes
    checksum: Extent = "off"
    spare_page: int | None = None


class Welcome(msgspec.Struct, tag="welcome", frozen=True):
    instance: str


class Refused(msgspec.Struct, tag="refused", frozen=True):
    """``restarted``: the sender is another instance than expected; ask the bootstrap server again. ``unfit``: the two
    will never fit together."""

    message: str
    restarted: bool = False
    unfit: bool = False


class Reserve(msgspec.Struct, tag="reserve", frozen=True):
    """A destination: ``page_ids`` (int32, little endian) take the prompt's pages from ``first_page`` on."""

    room: int
    stamp: int
    prompt_digest: int
    num_prompt_tokens: int
    first_page: int
    page_ids: bytes


class Result(msgspec.Struct, tag="result", frozen=True):
    room: int
    stamp: int
    instance: str
    result: PrefillResult
    checksum: int = 0


class Landing(msgspec.Struct, tag="landing", frozen=True):
    """The result, before its pages: they have landed when the receiver's bell at ``place`` shows ``value``. The sender
    rings no other with that value, and sends the Result all the same."""

    room: int
    stamp: int
    instance: str
    result: PrefillResult
    place: int
    value: int


class Taken(msgspec.Struct, tag="taken", frozen=True):
    room: int
    stamp: int


class Decline(msgspec.Struct, tag="decline", frozen=True):
    room: int
    code: str
    message: str

    @property
    def error(self) -> errors.ServingError:
        return errors.from_code(self.code, self.message)


class Abort(msgspec.Struct, tag="abort", frozen=True):
    room: int
    stamp: int
    code: str
    message: str

    @property
    def error(self) -> errors.ServingError:
        return errors.from_code(self.code, self.message)


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



def misfit(why: str) -> str:
    """A sentence on what RankInfo.mismatch of a decode rank tells."""
    return f"prefill and decode do not fit together: {why} (decode, prefill)"


ToSender = Hello | Reserve | Decline | Taken | Abort | Pong | Bye
ToReceiver = Welcome | Refused | Landing | Result | Abort | Stopped | Ping | Gone

encode = msgspec.msgpack.Encoder().encode
_to_sender = msgspec.msgpack.Decoder(ToSender)
_to_receiver = msgspec.msgpack.Decoder(ToReceiver)


def decode_to_sender(frame: bytes) -> ToSender:
    """Raises one of ``UNREADABLE`` on anything else."""
    result: ToSender = _to_sender.decode(frame)
    return result


def decode_to_receiver(frame: bytes) -> ToReceiver:
    """Raises one of ``UNREADABLE`` on anything else."""
    result: ToReceiver = _to_receiver.decode(frame)
    return result


def pack_page_ids(page_ids: np.ndarray) -> bytes:
    return np.ascontiguousarray(page_ids, dtype="<i4").tobytes()


def unpack_page_ids(packed: bytes) -> np.ndarray:
    """``[num_pages]`` int64. Raises ValueError when the length is no multiple of 4."""
    return np.frombuffer(packed, dtype="<i4").astype(np.int64)
