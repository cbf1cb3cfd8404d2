"""Messages between a server's API server process and its engine ranks (msgpack over ZMQ, tagged unions).

API server -> rank 0: ``ToEngine``. Rank 0 -> API server: ``FromEngine``; with data-parallel attention, the first rank
of each attention group sends, and all of these answer ``Control``, ``ConnectPeer``, ``GetState`` and
``PrepareGrammar``. The engine sends exactly one terminal message (an output with ``finish`` set, or ``Failed``) for
every ``Generate`` it receives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from .grammar import GrammarSpec, Vocabulary
from .identity import ModelIdentity
from .namespace import SHARED, Namespace
from .sampling import SamplingParams


class Bootstrap(msgspec.Struct, frozen=True, array_like=True):
    """Rendezvous of the two requests of one attempt: the prefill server's bootstrap address, and the bootstrap room.

    ``previous`` is the room of the previous attempt with the same prefill server, if there was one.
    ``dp_rank`` is the prefill server's data-parallel rank, where it does not follow from the room."""

    host: str
    port: int
    room: int
    previous: int | None = None
    dp_rank: int | None = None


Pooling = Literal["last", "mean", "cls"]
"""A prompt's vector is its last token's hidden state, or the mean over all tokens."""


class CustomProcessor(msgspec.Struct, frozen=True, array_like=True):
    """A logit processor that the engine imports, ``package.module:Name``, or unpickles, in SGLang's serialized form,
    and this request's parameters for it."""

    path: str
    params: dict[str, Any] = {}


class Generate(msgspec.Struct, tag=True):
    """Run one prompt. ``deadline`` is in seconds from arrival, None for the server's default.

    ``logprob_start_len`` is the first prompt position whose logprob is requested; -1 means none of the prompt.
    ``token_ids_logprob``: tokens whose logprobs are requested at every position. The last ``num_answered`` of
    ``input_ids`` are output that another server has sent already: they count as output for penalties.
    ``input_embeds`` (float32, little endian, one row of the model's hidden size each) replace the first token
    embeddings: the ids at these positions have no meaning.
    """

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1
    token_ids_logprob: list[int] = []
    num_answered: int = 0
    bootstrap: Bootstrap | None = None
    priority: int | None = None  # None: the server's default
    deadline: float | None = None
    traced: bool = False  # the API server asks for the request's latency spans
    pooling: Pooling | None = None  # on an embedding server
    processor: CustomProcessor | None = None
    input_embeds: bytes | None = None
    return_hidden_states: bool = False
    return_routed_experts: bool = False
    namespace: Namespace = SHARED  # of its pages in the prefix cache
    dp_rank: int | None = None  # the data-parallel rank that computes it; None where there is one
    aborted: bool = False  # before it was sent: then it never is
    slo_ttft: float | None = None  # objectives in seconds: to the first token, and a token after it
    slo_tpot: float | None = None
    sends_kv: bool = False  # the prompt is computed for the server that named the bootstrap room, not decoded here


SpanName = Literal["meeting", "queue", "prefill", "transfer", "decode"]


class LatencySpan(msgspec.Struct, frozen=True, array_like=True):
    """A latency span of a request in an engine, and its end on the host's monotonic clock in seconds. It begins at the
    end of the previous one, the first at the request's arrival."""

    name: SpanName
    end: float


class Abort(msgspec.Struct, tag=True):
    """Cancel one request (``rid``), or all (``rid == ""``). ``silent``: the API server has already answered it
    (a stop string matched, the client left) and expects no terminal message."""

    rid: str
    silent: bool = False


class Control(msgspec.Struct, tag=True):
    """Run an administrative command (see ``common/commands``): its registered name and its encoded struct. Answered by
    ``Done``."""

    seq: int
    name: str
    arguments: msgspec.Raw


class GetState(msgspec.Struct, tag=True):
    """Answered by ``State``."""

    seq: int


class Shutdown(msgspec.Struct, tag=True):
    """Finish the step in flight, then leave the loop."""


class PrepareGrammar(msgspec.Struct, tag=True):
    """Prepare a grammar, which requests sent after the answer (``Done``) may name. ``vocabulary`` comes with the first.
    ``compiled``: the grammar as another process has compiled it; without that the engine compiles it itself."""

    seq: int
    spec: GrammarSpec
    vocabulary: Vocabulary | None = None
    compiled: str | None = None


class DropGrammar(msgspec.Struct, tag=True):
    """Drop a grammar: no later request names it, unless it is prepared again."""

    spec: GrammarSpec


class ConnectPeer(msgspec.Struct, tag=True):
    """Connect to the prefill server whose bootstrap server is at ``host`` and ``port``, before a request needs it.
    Answered by ``Done``, whose code is ``kv_transfer_failed:pair_mismatch`` where the two are incompatible."""

    seq: int
    host: str
    port: int


ToEngine = Generate | Abort | Control | ConnectPeer | GetState | PrepareGrammar | DropGrammar | Shutdown

FinishReason = Literal["stop", "length", "abort"]


class Finish(msgspec.Struct, array_like=True):
    """Reason why generation ended. ``matched`` is the stop token id, where one did."""

    reason: FinishReason
    matched: int | None = None


class Logprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of consecutive tokens.

    ``top`` and ``of_ids`` (those of the requested ids) have a list of ``(token id, logprob)`` pairs for each token.
    """

    token_ids: list[int]
    values: list[float | None]
    top: list[list[tuple[int, float]]] = []
    of_ids: list[list[tuple[int, float]]] = []


class LoadedTokens(msgspec.Struct, frozen=True, array_like=True):
    """Those of a prompt's cached tokens that came from KV tiers: from ``host`` memory, and from the storage that is
    named, if the server has one."""

    host: int = 0
    storage: int = 0
    storage_backend: str | None = None


class PromptUsage(msgspec.Struct, frozen=True, array_like=True):
    """Prompt tokens of a request, and how many of them came from a cache, ``loaded`` from tiers below it."""

    num_tokens: int
    num_cached_tokens: int
    loaded: LoadedTokens | None = None


class OutputExtras(msgspec.Struct, omit_defaults=True):
    """A request's report of a step, apart from new tokens. ``usage`` and ``prompt_logprobs`` are in its first report
    only; ``finish`` is in its last."""

    usage: PromptUsage | None = None
    finish: Finish | None = None
    logprobs: Logprobs | None = None  # of the new tokens
    prompt_logprobs: Logprobs | None = None
    embedding: bytes | None = None  # float32, of a request with ``pooling``; class scores of a classifier
    hidden_states: bytes | None = None  # float32 rows of the positions after those sent before
    routed_experts: bytes | None = None  # uint16 [n, layers, top_k], likewise
    spans: list[LatencySpan] = []  # those that ended since the last report, of traced requests


class Output(NamedTuple):
    """One request's row of an OutputBatch."""

    rid: str
    token_ids: list[int]
    extras: OutputExtras | None = None
    num_drafts: int = 0

    @property
    def finish(self) -> Finish | None:
        return None if self.extras is None else self.extras.finish


class OutputBatch(msgspec.Struct, tag=True):
    """The outputs of one engine step, in columns: request ``rids[i]`` has ``counts[i]`` of the new ``token_ids``, which
    follow each other in the order of the rows. ``counts`` is None where each row has one token. ``extras`` are those of
    the rows, by index, that report more than tokens. ``num_drafts``: drafts that were verified for each row, None
    where there were none; those that were accepted are among its tokens."""

    rids: list[str]
    token_ids: list[int]
    counts: list[int] | None = None
    extras: dict[int, OutputExtras] = {}
    num_drafts: list[int] | None = None

    @classmethod
    def of(cls, outputs: Iterable[Output]) -> OutputBatch:
        """Returns the message with these rows."""
        batch = cls([], [], [])
        for output in outputs:
            batch.append(*output)
        return batch

    def append(self, rid: str, token_ids: list[int], extras: OutputExtras | None, num_drafts: int = 0) -> None:
        """Appends a row."""
        if num_drafts or self.num_drafts is not None:
            self._extend_drafts([num_drafts])
        if self.counts is None and len(token_ids) != 1:
            self.counts = [1] * len(self.rids)
        if self.counts is not None:
            self.counts.append(len(token_ids))
        if extras is not None:
            self.extras[len(self.rids)] = extras
        self.rids.append(rid)
        self.token_ids += token_ids

    def extend(self, rids: list[str], token_ids: list[int], counts: list[int] | None = None,
               num_drafts: list[int] | None = None) -> None:
        """Appends rows that have tokens alone: one each, or ``counts``; ``num_drafts`` were verified for them."""
        if num_drafts is not None or self.num_drafts is not None:
            self._extend_drafts(num_drafts or [0] * len(rids))
        if counts is not None and self.counts is None:
            self.counts = [1] * len(self.rids)
        if self.counts is not None:
            self.counts += [1] * len(rids) if counts is None else counts
        self.rids += rids
        self.token_ids += token_ids

    def _extend_drafts(self, num_drafts: list[int]) -> None:
        """Appends to ``num_drafts`` before the rows are appended."""
        if self.num_drafts is None:
            self.num_drafts = [0] * len(self.rids)
        self.num_drafts += num_drafts

    def rows(self) -> Iterator[Output]:
        """Yields the rows."""
        extras, token_ids = self.extras, self.token_ids
        if self.counts is None and self.num_drafts is None:
            for row, (rid, token_id) in enumerate(zip(self.rids, token_ids)):
                yield Output(rid, [token_id], extras.get(row))
            return
        begin = 0
        num_drafts = self.num_drafts
        for row, (rid, count) in enumerate(zip(self.rids, self.counts or [1] * len(self.rids))):
            yield Output(rid, token_ids[begin:begin + count], extras.get(row),
                         0 if num_drafts is None else num_drafts[row])
            begin += count


class Failed(msgspec.Struct, tag=True):
    """A request ended with an error; ``code`` is a ServingError's ``wire_code``."""

    rid: str
    code: str
    message: str


class Loading(msgspec.Struct, tag=True):
    """Start-up progress: ``stage`` is a short phrase, ``fraction`` goes from 0 to 1 within it."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, tag=True):
    """All ranks are up. ``max_total_tokens`` is the KV pool's size in tokens."""

    max_total_tokens: int
    max_request_tokens: int
    model: ModelIdentity | None = None
    pair_key: str | None = None


class StartFailed(msgspec.Struct, tag=True):
    """A rank failed to start; ``message`` is one sentence for the operator."""

    message: str


class Done(msgspec.Struct, tag=True):
    """A command was executed, or failed: ``code`` is then a ServingError's. ``message`` is a sentence."""

    seq: int
    message: str
    code: str | None = None


class State(msgspec.Struct, tag=True):
    """A snapshot of the engine, for ``/get_server_info``, load reports, metrics and tests.

    ``free_pages + held_pages + cached_pages == total_pages`` always; ``held_pages`` is 0 when idle.
    ``counters`` only grow (names without the metric prefix), ``gauges`` are current values.
    ``dp_rank`` is that of the data-parallel rank that answers. ``pair_key`` is equal for servers of one role that are
    compatible with the same servers of the other.
    """

    seq: int
    total_pages: int
    free_pages: int
    held_pages: int
    cached_pages: int
    page_size: int
    num_running: int
    num_waiting: int
    num_transferring: int
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    dp_rank: int = 0
    model: ModelIdentity | None = None
    pair_key: str | None = None


RANK_TOTALS = frozenset(("kv_bytes_sent", "kv_bytes_received", "kv_messages_dropped", "kv_writes_queued",
                         "kv_writes_in_flight", "storage_bytes_read", "storage_bytes_written", "storage_read_seconds",
                         "storage_write_seconds", "storage_pages_dropped", "storage_pages_queued",
                         "storage_objects_evicted", "storage_times_aside", "storage_errors_corrupt",
                         "storage_errors_foreign", "storage_errors_read", "storage_errors_write",
                         "storage_errors_query"))
"""Counters and gauges that differ from rank to rank. All others are equal on ranks that share requests, and the first
of these ranks reports them for all."""


class RankTotals(msgspec.Struct, tag=True):
    """Supplements the ``State`` of a data-parallel rank: RANK_TOTALS of one of its other ranks, by name."""

    seq: int
    dp_rank: int
    totals: dict[str, float]


FromEngine = OutputBatch | Failed | Loading | Ready | StartFailed | Done | State | RankTotals

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)

encode = _encoder.encode
decode_to_engine = _to_engine.decode
decode_from_engine = _from_engine.decode
