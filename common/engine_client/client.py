"""The front's side of the engine: requests, what comes of them, and questions to the engine as a whole."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from ..api.commands import Command, ContinueGeneration, PauseGeneration, PauseMode
from ..api.errors import (
    Conflict,
    EngineDead,
    InvalidRequest,
    Overloaded,
    ServingError,
    from_code,
)
from ..api.grammar import GrammarSpec, Vocabulary
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
    PrepareGrammar,
    RankTotals,
    Ready,
    Shutdown,
    StartFailed,
    State,
    ToEngine,
)
from .dp_balancer import DPBalancer
from .dp_states import merged, whole
from .engine_channel import EngineChannel
from .engine_rpc import Answer, EngineRPC, Question
from .output_stream import OutputStream
from .pending_requests import PendingRequests
from .request_ids import RequestIds

_REPLY_SECONDS = 10.0
_COMPILE_SECONDS = 120.0  # a grammar's; it waits for others, and with the first xgrammar is imported


class EngineClient:
    """Sends requests to rank 0 and hands the engine's outputs to whoever waits for them.

    One message carries all outputs of an engine step, and they are handed on by plain calls: no task, and no queue
    operation, per token. Must be used from one event loop. ``on_startup`` is told of Loading, Ready and StartFailed.
    """

    def __init__(self, max_requests: int, on_startup: Callable[[Loading | Ready | StartFailed], None],
                 balancer: DPBalancer | None = None, num_ranks: int = 1):
        """``max_requests``: requests that may be open; more are refused with Overloaded. ``balancer``: of an engine
        with several data-parallel ranks, of ``num_ranks`` processes in all."""
        self._max_requests = max_requests
        self._on_startup = on_startup
        self._balancer = balancer
        self.channel = EngineChannel()
        self._receiver: asyncio.Task[None] | None = None
        self._names = RequestIds()
        self._streams: dict[str, OutputStream] = {}  # by the requests' names
        self._questions = EngineRPC(1 if balancer is None else balancer.size, num_ranks, self._send)
        self._dead: str | None = None
        self.expected = PendingRequests()
        self._held: dict[str, Generate] | None = None  # by name: requests that wait for the end of a pause

    def start(self) -> None:
        self._receiver = asyncio.create_task(self._receive(), name="engine-outputs")

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    @property
    def dead(self) -> str | None:
        """Why the engine is gone, None while it is there."""
        return self._dead

    # ------------------------------------------------------------------ requests

    def open(self, requests: Sequence[Generate]) -> OutputStream:
        """A stream of the requests' outputs; they are sent on entering it.

        Entering raises EngineDead, Conflict for an id in use, Overloaded, and
        InvalidRequest for more than the server holds.
        """
        return OutputStream(self, requests)

    async def generate(self, request: Generate) -> AsyncIterator[Output]:
        """Outputs of one request; the last one has ``finish`` set. Raises ServingError where it fails."""
        with self.open([request]) as stream:
            while stream.live:
                for output in await stream.next():
                    yield output

    def enter(self, stream: OutputStream, requests: Sequence[Generate]) -> None:
        """Send what a stream is of; called by the stream, which is left in the same way (``abandon``)."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        if len(requests) > self._max_requests:  # a client that tries again would do so for ever
            raise InvalidRequest(f"The request asks for {len(requests)} answers, and the server holds "
                                 f"{self._max_requests} at most; split it.")
        if len(self._streams) + len(requests) > self._max_requests:
            raise Overloaded(f"The server holds {len(self._streams)} requests, of {self._max_requests} at most; "
                             "try again later.", retry_after=1.0)
        taken = [request.rid for request in requests if self._names.of(request.rid) in self._streams]
        if taken or len({request.rid for request in requests}) < len(requests):
            raise Conflict(f"Request id {(taken or [requests[0].rid])[0]!r} is in use; choose another.", param="rid")
        for request in requests:
            name = self._names.choose(request.rid)
            self._streams[name] = stream
            if name != request.rid:
                request = msgspec.structs.replace(request, rid=name)
            if self._balancer is not None:
                self._balancer.place(request)
            if request.aborted:
                self._end_unsent(request)
            elif self._held is None:
                self._send(request)
            else:
                self._held[name] = request

    async def pause(self, mode: PauseMode) -> str:
        """Stand still until ``resume``; requests that come meanwhile wait here. Returns what ``control`` does."""
        begins, self._held = self._held is None, self._held or {}
        try:
            done = await self.control(PauseGeneration(mode))
        except ServingError:
            if begins:
                self._release()
            raise
        if mode == "abort":
            self._send(Abort("", False))
        return done

    async def resume(self) -> str:
        """Go on after ``pause``; harmless without one."""
        done = await self.control(ContinueGeneration())
        self._release()
        return done

    @property
    def paused(self) -> bool:
        return self._held is not None

    def _release(self) -> None:
        held, self._held = self._held, None
        for request in (held or {}).values():
            self._send(request)

    def _take_held(self, name: str) -> list[Generate]:
        """Those that wait for the end of a pause and shall not any more; all for an empty name."""
        if not self._held:
            return []
        names = list(self._held) if not name else [name] if name in self._held else []
        return [self._held.pop(one) for one in names]

    def abort(self, rid: str, silent: bool = False) -> None:
        """Cancel a request, or all for ``rid == ""``; unless ``silent``, whoever waits for it gets the tokens so far,
        with the finish reason "abort"."""
        name = self._names.of(rid)
        for request in self._take_held(name):
            self._end_unsent(request)
        self.expected.abort(rid)
        self._send(Abort(name, silent))

    def _end_unsent(self, request: Generate) -> None:
        """``request`` goes by its name."""
        self._deliver(Output(request.rid, [], len(request.input_ids), 0, 0, Finish("abort")))

    def abort_group(self, rid: str) -> None:
        """Cancel a request and, where it was asked for several choices, all of them (``rid-0``, ``rid-1``, ...)."""
        for own in [*map(self._names.rid, self._streams), *self.expected.ids()]:
            head, _, tail = own.rpartition("-")
            if own == rid or (head == rid and tail.isdigit()):
                self.abort(own)

    def abandon(self, rid: str) -> None:
        """Nobody waits for a request any more."""
        name = self._names.of(rid)
        if self._forget(name) is not None:
            if not self._take_held(name):
                self._send(Abort(name, silent=True))
            self._names.abandon(rid)

    def _forget(self, name: str) -> tuple[OutputStream, str] | None:
        """The stream and the id of a request that has ended; None where it had before."""
        stream = self._streams.pop(name, None)
        if stream is None:
            return None
        if self._balancer is not None:
            self._balancer.ended(name)
        return stream, self._names.drop(name)

    # ------------------------------------------------------------------ the engine as a whole

    async def state(self) -> State:
        """A snapshot of the engine; raises WorkerUnavailable where it does not answer."""
        return merged(await self.states())

    async def states(self) -> list[State]:
        """``state`` of each data-parallel rank, in order."""
        return whole(await self._ask(GetState))

    async def control(self, command: Command, timeout: float = _REPLY_SECONDS) -> str:
        """Change the engine as a whole; returns a sentence that says what was done. Raises the ServingError with which
        the engine refused."""
        return _agreed(await self._ask(lambda seq: Control(seq, command), timeout))

    async def connect_peer(self, host: str, port: int, timeout: float) -> None:
        """Connect a decode server to the prefill server whose bootstrap server is there; returns when its data path has
        been used once. Raises the ServingError that a request of this pair would end with."""
        _agreed(await self._ask(lambda seq: ConnectPeer(seq, host, port), timeout))

    async def prepare_grammar(self, spec: GrammarSpec, vocabulary: Vocabulary | None,
                              compiled: str | None = None) -> None:
        """Returns when the engine takes requests with this grammar; raises ServingError. ``vocabulary`` must come with
        the first."""
        _agreed(await self._ask(lambda seq: PrepareGrammar(seq, spec, vocabulary, compiled), _COMPILE_SECONDS))

    def drop_grammar(self, spec: GrammarSpec) -> None:
        """Let the engine forget a grammar that no further request will name."""
        self._send(DropGrammar(spec))

    async def _ask(self, question: Callable[[int], Question], timeout: float = _REPLY_SECONDS) -> list[Answer]:
        if self._dead is not None:
            raise EngineDead(self._dead)
        return await self._questions.ask(question, timeout)

    def engine_died(self, reason: str) -> None:
        """Fail all that waits, with EngineDead, and refuse what comes; ``reason`` is a sentence."""
        self._dead = reason
        self.channel.drop_unsent()
        for name in list(self._streams):
            self._fail(name, EngineDead(reason))
        self._questions.fail(EngineDead(reason))

    def fail_open(self, error: ServingError) -> None:
        """End every request that is open, whoever waits for it with ``error``."""
        self._send(Abort("", silent=True))
        for name in list(self._streams):
            self._fail(name, error)

    def shut_down(self) -> None:
        """Tell the ranks to leave their loops."""
        self._send(Shutdown())

    async def close(self) -> None:
        """Close the channel; the ranks must be gone."""
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
            self._dispatch(await self.channel.receive())

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case OutputBatch():
                for output in message.items:
                    self._deliver(output)
            case Failed(name, code, text):
                self._fail(name, from_code(code, text))
            case State() | RankTotals() | Done():
                self._questions.answered(message)
            case Loading() | Ready() | StartFailed():
                self._on_startup(message)

    def _fail(self, name: str, error: ServingError) -> None:
        if (found := self._forget(name)) is not None:
            stream, rid = found
            stream.fail(rid, error)

    def _deliver(self, output: Output) -> None:
        """An output of an unknown request is of one that ended here before the engine knew; it is dropped."""
        name = output.rid
        stream = self._streams.get(name)
        if stream is None:
            return
        if self._balancer is not None:
            self._balancer.grew(name, len(output.token_ids))
        if self._names.renamed:
            output.rid = self._names.rid(name)
        if output.finish is not None:
            self._forget(name)
        stream.put(output)


def _agreed(replies: Sequence[Answer]) -> str:
    """What was done; raises the ServingError with which a part of the engine refused."""
    done = [reply for reply in replies if isinstance(reply, Done)]
    for reply in done:
        if reply.code is not None:
            raise from_code(reply.code, reply.message)
    return done[0].message
