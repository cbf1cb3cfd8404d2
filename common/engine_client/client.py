"""Engine client of the API server: sends requests, delivers their outputs, and calls the engine as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Literal, Protocol

import msgspec

from ..api.errors import (
    Conflict,
    EngineDead,
    InvalidRequest,
    Overloaded,
    ServingError,
    from_code,
)
from ..api.grammar import GrammarSpec, Vocabulary
from ..api.merged_states import merge_states
from ..api.messages import (
    Abort,
    ConnectPeer,
    Control,
    Done,
    DropGrammar,
    Failed,
    Finish,
    FromEngine,
    Generate,
    GetState,
    Loading,
    Output,
    OutputBatch,
    OutputExtras,
    PrepareGrammar,
    PromptUsage,
    RankTotals,
    Ready,
    Shutdown,
    StartFailed,
    State,
    ToEngine,
    encode,
)
from ..commands.registry import name_of
from .dp_balancer import DPBalancer
from .dp_states import with_rank_totals
from .engine_channel import EngineChannel
from .engine_rpc import EngineRPC, RPCReply, RPCRequest
from .output_stream import OutputStream
from .pending_requests import PendingRequests
from .request_ids import RequestIds

HoldReason = Literal["pause", "weights"]
"""Why new requests wait: generation is paused, or the weights are about to change."""
_REPLY_SECONDS = 10.0
_COMPILE_SECONDS = 120.0  # for a grammar: it may wait for others, and the first one imports xgrammar


class Channel(Protocol):
    """The way to the engine: EngineChannel, or another process that has one."""

    def send(self, message: ToEngine) -> None: ...

    def drop_unsent(self) -> None:
        """Drop messages that no rank will receive."""

    async def receive(self) -> FromEngine: ...

    def close(self) -> None: ...


class Receiver(Protocol):
    """Takes the outputs of requests, until each has ended."""

    def put(self, output: Output) -> None: ...

    def fail(self, rid: str, error: ServingError) -> None: ...


class EngineClient:
    """Sends requests to rank 0 and delivers the engine's outputs to the streams that wait for them.

    One message has all outputs of an engine step, and they are delivered by plain calls: no task, and no queue
    operation, per token. Must be used from one event loop. ``on_startup`` is called with Loading, Ready and
    StartFailed.
    """

    def __init__(self, max_requests: int, on_startup: Callable[[Loading | Ready | StartFailed], None],
                 balancer: DPBalancer | None = None, num_ranks: int = 1, channel: Channel | None = None):
        """``max_requests``: requests that may be open; more are refused with Overloaded. ``balancer``: of an engine
        with several data-parallel ranks, of ``num_ranks`` processes in total. ``channel``: an EngineChannel, unless
        given."""
        self.max_requests = max_requests
        self._on_startup = on_startup
        self._balancer = balancer
        self.channel = EngineChannel() if channel is None else channel
        self._receiver: asyncio.Task[None] | None = None
        self._ids = RequestIds()
        self._streams: dict[str, Receiver] = {}  # by engine id
        self._rpc = EngineRPC(1 if balancer is None else balancer.size, num_ranks, self._send)
        self._dead: str | None = None
        self.pending = PendingRequests()
        self._holds: set[HoldReason] = set()
        self._paused: dict[str, Generate] | None = None  # requests that wait for the end of a pause, by engine id
        self.on_abort: Callable[[str], None] | None = None
        """Called with the id of each request (of a group, for several choices) that is aborted, "" for all of them."""

    def start(self) -> None:
        self._receiver = asyncio.create_task(self._receive(), name="engine-outputs")

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def dead(self) -> str | None:
        """Reason why the engine has died, None while it lives."""
        return self._dead

    # ------------------------------------------------------------------ requests

    def open(self, requests: Sequence[Generate]) -> OutputStream:
        """A stream of the requests' outputs; entering it sends the requests.

        Entering raises EngineDead, Conflict for an id in use, Overloaded, and
        InvalidRequest for more requests than the server's limit.
        """
        return OutputStream(self, requests)

    async def generate(self, request: Generate) -> AsyncIterator[Output]:
        """Outputs of one request; the last one has ``finish`` set. Raises ServingError where it fails."""
        with self.open([request]) as stream:
            while stream.live:
                for output in await stream.next():
                    yield output

    def submit(self, stream: Receiver, requests: Sequence[Generate]) -> None:
        """Send a stream's requests; called by the stream, which calls ``abandon`` for those that it leaves."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if len(requests) > self.max_requests:  # a client that retried would do so for ever
            raise InvalidRequest(f"The request asks for {len(requests)} answers, and the server holds "
                                 f"{self.max_requests} at most; split it.")
        if len(self._streams) + len(requests) > self.max_requests:
            raise Overloaded(f"The server holds {len(self._streams)} requests, of {self.max_requests} at most; "
                             "try again later.", retry_after=1.0)
        used = [request.rid for request in requests if self._ids.engine_id(request.rid) in self._streams]
        if used or len({request.rid for request in requests}) < len(requests):
            raise Conflict(f"Request id {(used or [requests[0].rid])[0]!r} is in use; choose another.", param="rid")
        for request in requests:
            engine_id = self._ids.assign(request.rid)
            self._streams[engine_id] = stream
            if engine_id != request.rid:
                request = msgspec.structs.replace(request, rid=engine_id)
            if self._balancer is not None:
                self._balancer.assign(request)
            if request.aborted:
                self._end_unsent(request)
            elif self._paused is None:
                self._send(request)
            else:
                self._paused[engine_id] = request

    @contextlib.contextmanager
    def hold_requests(self, reason: HoldReason = "pause") -> Iterator[None]:
        """From the block on, new requests wait here until ``send_held``; not where the block raises ServingError."""
        begins = reason not in self._holds
        self._holds.add(reason)
        self._paused = self._paused or {}
        try:
            yield
        except ServingError:
            if begins:
                self.send_held(reason)
            raise

    @property
    def paused(self) -> bool:
        """True while new requests wait here."""
        return self._paused is not None

    @property
    def generation_paused(self) -> bool:
        """True while they wait because generation is paused."""
        return "pause" in self._holds

    @property
    def num_held(self) -> int:
        """Requests that wait here."""
        return len(self._paused or ())

    def send_held(self, reason: HoldReason = "pause") -> None:
        """Send the requests that wait for no other reason; harmless where none do."""
        self._holds.discard(reason)
        if self._holds:
            return
        paused, self._paused = self._paused, None
        for request in (paused or {}).values():
            self._send(request)

    def _pop_paused(self, engine_id: str) -> list[Generate]:
        """Remove a request that waits for the end of a pause; all of them for an empty id."""
        if not self._paused:
            return []
        ids = list(self._paused) if not engine_id else [engine_id] if engine_id in self._paused else []
        return [self._paused.pop(one) for one in ids]

    def abort(self, rid: str, silent: bool = False) -> None:
        """Cancel a request, or all for ``rid == ""``; unless ``silent``, its stream gets the tokens so far, with the
        finish reason "abort"."""
        engine_id = self._ids.engine_id(rid)
        for request in self._pop_paused(engine_id):
            self._end_unsent(request)
        self.pending.abort(rid)
        self._send(Abort(engine_id, silent))
        if not rid and self.on_abort is not None:
            self.on_abort(rid)

    def abort_sent(self) -> None:
        """Cancel all requests that the engine has; those that wait here still wait."""
        self._send(Abort("", False))

    def _end_unsent(self, request: Generate) -> None:
        """End a request that was not sent to the engine; ``request.rid`` is its engine id."""
        self._deliver(Output(request.rid, [], OutputExtras(PromptUsage(len(request.input_ids), 0), Finish("abort"))))

    def abort_group(self, rid: str) -> None:
        """Cancel a request and, where it asked for several choices, all of them (``rid-0``, ``rid-1``, ...)."""
        for own in [*map(self._ids.client_id, self._streams), *self.pending.ids()]:
            prefix, _, suffix = own.rpartition("-")
            if own == rid or (prefix == rid and suffix.isdigit()):
                self.abort(own)
        if self.on_abort is not None:
            self.on_abort(rid)

    def abandon(self, rid: str) -> None:
        """End a request that no stream waits for any more, silently."""
        engine_id = self._ids.engine_id(rid)
        if self._close_request(engine_id) is not None:
            if not self._pop_paused(engine_id):
                self._send(Abort(engine_id, silent=True))
            self._ids.abandon(rid)

    def _close_request(self, engine_id: str) -> tuple[Receiver, str] | None:
        """Remove a request that has ended; returns its stream and client id, None where it was removed before."""
        stream = self._streams.pop(engine_id, None)
        if stream is None:
            return None
        if self._balancer is not None:
            self._balancer.release(engine_id)
        return stream, self._ids.release(engine_id)

    # ------------------------------------------------------------------ the engine as a whole

    async def state(self) -> State:
        """A snapshot of the engine; raises WorkerUnavailable where it does not answer."""
        return merge_states(await self.states())

    async def states(self) -> list[State]:
        """The state of each data-parallel rank, in order."""
        return with_rank_totals(await self._call(GetState))

    async def control(self, command: msgspec.Struct, timeout: float = _REPLY_SECONDS) -> str:
        """Run an administrative command, the struct of a registered one; returns a sentence about what was done. Raises
        the ServingError with which the engine refused."""
        name, arguments = name_of(command), msgspec.Raw(encode(command))
        return _sentence_of(await self._call(lambda seq: Control(seq, name, arguments), timeout))

    async def connect_peer(self, host: str, port: int, timeout: float) -> None:
        """Connect a decode server to the prefill server whose bootstrap server has this address; returns when its data
        path has been used once. Raises the ServingError that a request of this pair would end with."""
        _sentence_of(await self._call(lambda seq: ConnectPeer(seq, host, port), timeout))

    async def prepare_grammar(self, spec: GrammarSpec, vocabulary: Vocabulary | None,
                              compiled: str | None = None) -> None:
        """Prepare a grammar; returns when the engine accepts requests with it. Raises ServingError. ``vocabulary`` must
        come with the first."""
        _sentence_of(await self._call(lambda seq: PrepareGrammar(seq, spec, vocabulary, compiled), _COMPILE_SECONDS))

    def drop_grammar(self, spec: GrammarSpec) -> None:
        """Let the engine drop a grammar that no further request will name."""
        self._send(DropGrammar(spec))

    async def _call(self, make_request: Callable[[int], RPCRequest], timeout: float = _REPLY_SECONDS) -> list[RPCReply]:
        if self._dead is not None:
            raise EngineDead(self._dead)
        return await self._rpc.call(make_request, timeout)

    def engine_died(self, reason: str) -> None:
        """Fail all open requests and calls with EngineDead, and refuse new ones; ``reason`` is a sentence."""
        self._dead = reason
        self.channel.drop_unsent()
        for engine_id in list(self._streams):
            self.fail(engine_id, EngineDead(reason))
        self._rpc.fail(EngineDead(reason))

    def fail_all(self, error: ServingError) -> None:
        """End every open request; their streams raise ``error``."""
        self._send(Abort("", silent=True))
        for engine_id in list(self._streams):
            self.fail(engine_id, error)

    def shut_down(self) -> None:
        """Ask the ranks to leave their loops."""
        self._send(Shutdown())

    async def close(self) -> None:
        """Close the channel; the ranks must have ended."""
        self._dead = self._dead or "The server has stopped."
        if self._receiver is not None:
            self._receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiver
        self.channel.close()

    # ------------------------------------------------------------------ messages

    def _send(self, message: ToEngine) -> None:
        if self._dead is None:
            self.channel.send(message)

    async def _receive(self) -> None:
        while True:
            self.dispatch(await self.channel.receive())

    def dispatch(self, message: FromEngine) -> None:
        """Handle a message of the engine."""
        match message:
            case OutputBatch():
                for output in message.rows():
                    self._deliver(output)
            case Failed(engine_id, code, text):
                self.fail(engine_id, from_code(code, text))
            case State() | RankTotals() | Done():
                self._rpc.on_reply(message)
            case Loading() | Ready() | StartFailed():
                self._on_startup(message)

    def fail(self, engine_id: str, error: ServingError) -> None:
        """End a request with an error; one that has ended is left alone."""
        if (closed := self._close_request(engine_id)) is not None:
            stream, rid = closed
            stream.fail(rid, error)

    def _deliver(self, output: Output) -> None:
        """Hand an output to its stream. An unknown id is that of a request that ended here before the engine received
        the abort: its output is dropped."""
        engine_id = output.rid
        stream = self._streams.get(engine_id)
        if stream is None:
            return
        if self._balancer is not None:
            self._balancer.add_tokens(engine_id, len(output.token_ids))
        if self._ids.aliases:
            output = output._replace(rid=self._ids.client_id(engine_id))
        if output.finish is not None:
            self._close_request(engine_id)
        stream.put(output)


def _sentence_of(replies: Sequence[RPCReply]) -> str:
    """The sentence about what was done; raises the ServingError with which a part of the engine refused."""
    done = [reply for reply in replies if isinstance(reply, Done)]
    for reply in done:
        if reply.code is not None:
            raise from_code(reply.code, reply.message)
    return done[0].message
