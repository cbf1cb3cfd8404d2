"""The front's end of the channel to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any

import zmq
import zmq.asyncio

from ..api.commands import Command
from ..api.errors import Conflict, Overloaded, ServingError, WorkerUnavailable, from_code
from ..api.grammar import GrammarSpec, Vocabulary
from ..api.messages import (
    Abort,
    Control,
    Done,
    DropGrammar,
    Failed,
    FromEngine,
    Generate,
    GetState,
    Loading,
    Output,
    Outputs,
    PrepareGrammar,
    Ready,
    Shutdown,
    StartFailed,
    State,
    ToEngine,
    decode_from_engine,
    encode,
)
from .balancer import Balancer
from .states import merged

_REPLY_SECONDS = 10.0
_COMPILE_SECONDS = 120.0  # a grammar's; it waits for others, and with the first xgrammar is imported
_RETRY_SECONDS = 0.005


def _private_folder() -> str:
    """A new folder that this user alone can enter. A Unix socket's path has 107 bytes at most, so a long TMPDIR (batch
    systems set such) is passed over."""
    return tempfile.mkdtemp(prefix="baton-", dir="/tmp" if len(tempfile.gettempdir()) > 70 else None)


class OutputStream:
    """Outputs of requests that were sent together, until each has ended. Use as a context manager.

    Leaving it aborts, silently, whatever has not ended: a client that left costs the engine nothing more.
    """

    def __init__(self, client: EngineClient, requests: Sequence[Generate]):
        self._client = client
        self._requests = requests
        self._live = {request.rid for request in requests}
        self._arrived: list[Output] = []
        self._error: ServingError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __enter__(self) -> OutputStream:
        self._client._open(self, self._requests)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for rid in list(self._live):
            self.abort(rid)

    @property
    def live(self) -> bool:
        """Whether ``next`` has more to give: outputs, or the error that ended a request."""
        return bool(self._live or self._arrived or self._error)

    async def next(self) -> list[Output]:
        """All outputs that have arrived; waits for a first one. Raises the ServingError that ended a request,
        after the outputs that came before it."""
        if not self._arrived and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        arrived, self._arrived = self._arrived, []
        if not arrived and self._error is not None:
            raise self._error
        return arrived

    def abort(self, rid: str) -> None:
        """End one request whose answer is complete already, or no longer wanted. Nothing more comes of it."""
        if rid in self._live:
            self._live.discard(rid)
            self._client._abandon(rid)
        self._arrived = [output for output in self._arrived if output.rid != rid]

    # Called by the client.

    def _put(self, output: Output) -> None:
        self._arrived.append(output)
        if output.finish is not None:
            self._live.discard(output.rid)
        self._wake()

    def _fail(self, rid: str, error: ServingError) -> None:
        self._live.discard(rid)
        self._error = self._error or error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Answers:
    """What ``wanted`` attention groups answer to one question."""

    def __init__(self, wanted: int):
        self.all: asyncio.Future[list[State | Done]] = asyncio.get_running_loop().create_future()
        self._wanted = wanted
        self._found: list[State | Done] = []

    def add(self, answer: State | Done) -> None:
        self._found.append(answer)
        if len(self._found) == self._wanted and not self.all.done():
            self.all.set_result(self._found)

    def fail(self, error: ServingError) -> None:
        if not self.all.done():
            self.all.set_exception(error)


class EngineClient:
    """Sends requests to rank 0 and hands the engine's outputs to whoever waits for them.

    One message carries all outputs of an engine step, and they are handed on by plain calls: no task, and no queue
    operation, per token. Must be used from one event loop. ``on_startup`` is told of Loading, Ready and StartFailed.
    """

    def __init__(self, max_requests: int, on_startup: Callable[[Loading | Ready | StartFailed], None],
                 balancer: Balancer | None = None):
        """``max_requests``: requests that may be open; more are refused with Overloaded. ``balancer``: of an engine
        with several data-parallel ranks."""
        self._max_requests = max_requests
        self._on_startup = on_startup
        self._balancer = balancer
        self._dp_size = 1 if balancer is None else balancer.size
        self.folder = _private_folder()
        self.to_engine = f"ipc://{self.folder}/to_engine"
        self.from_engine = f"ipc://{self.folder}/from_engine"
        self._context = zmq.asyncio.Context()
        # The class is named against the context's own: sending must not wait for an event loop.
        self._outbox: Any = self._context.socket(zmq.PUSH, socket_class=zmq.Socket)  # type: ignore[arg-type]
        self._outbox.sndhwm = 0
        self._outbox.bind(self.to_engine)
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.rcvhwm = 0
        self._inbox.bind(self.from_engine)
        self._receiver: asyncio.Task[None] | None = None
        self._streams: dict[str, OutputStream] = {}
        self._replies: dict[int, _Answers] = {}
        self._seq = itertools.count(1)
        self._dead: str | None = None
        self._unsent: deque[bytes] = deque()

    def listen(self, host: str) -> str:
        """A further endpoint for the engine's messages, for ranks on other hosts: a free TCP port of ``host``."""
        bracketed = f"[{host}]" if ":" in host else host
        self._inbox.ipv6 = ":" in host
        self._inbox.bind(f"tcp://{bracketed}:*")
        return self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)

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

        Entering raises WorkerUnavailable where the engine is gone, Conflict for an id in use, Overloaded.
        """
        return OutputStream(self, requests)

    async def generate(self, request: Generate) -> AsyncIterator[Output]:
        """Outputs of one request; the last one has ``finish`` set. Raises ServingError where it fails."""
        with self.open([request]) as stream:
            while stream.live:
                for output in await stream.next():
                    yield output

    def _open(self, stream: OutputStream, requests: Sequence[Generate]) -> None:
        if self._dead is not None:
            raise WorkerUnavailable(self._dead)
        if len(self._streams) + len(requests) > self._max_requests:
            raise Overloaded(f"The server holds {len(self._streams)} requests, of {self._max_requests} at most; "
                             "try again later.", retry_after=1.0)
        taken = [request.rid for request in requests if request.rid in self._streams]
        if taken or len({request.rid for request in requests}) < len(requests):
            raise Conflict(f"Request id {(taken or [requests[0].rid])[0]!r} is in use; choose another.", param="rid")
        for request in requests:
            self._streams[request.rid] = stream
            if self._balancer is not None:
                self._balancer.place(request)
            self._send(request)

    def abort(self, rid: str, silent: bool = False) -> None:
        """Cancel a request, or all for ``rid == ""``; unless ``silent``, whoever waits for it gets Aborted."""
        self._send(Abort(rid, silent))

    def abort_group(self, rid: str) -> None:
        """Cancel a request and, where it was asked for several choices, all of them (``rid-0``, ``rid-1``, ...)."""
        for name in list(self._streams):
            head, _, tail = name.rpartition("-")
            if name == rid or (head == rid and tail.isdigit()):
                self.abort(name)

    def _abandon(self, rid: str) -> None:
        if self._forget(rid) is not None:
            self.abort(rid, silent=True)

    def _forget(self, rid: str) -> OutputStream | None:
        """The stream of a request that has ended; None where it had before."""
        stream = self._streams.pop(rid, None)
        if stream is not None and self._balancer is not None:
            self._balancer.ended(rid)
        return stream

    # ------------------------------------------------------------------ the engine as a whole

    async def state(self) -> State:
        """A snapshot of the engine; raises WorkerUnavailable where it does not answer."""
        return merged(await self.states())

    async def states(self) -> list[State]:
        """``state`` of each data-parallel rank, in order."""
        seq = next(self._seq)
        replies = await self._ask(GetState(seq), seq)
        return sorted((reply for reply in replies if isinstance(reply, State)), key=lambda state: state.dp_rank)

    async def control(self, command: Command, timeout: float = _REPLY_SECONDS) -> str:
        """Change the engine as a whole; returns a sentence that says what was done. Raises the ServingError with which
        the engine refused."""
        seq = next(self._seq)
        return _agreed(await self._ask(Control(seq, command), seq, timeout))

    async def prepare_grammar(self, spec: GrammarSpec, vocabulary: Vocabulary | None) -> None:
        """Returns when the engine takes requests with this grammar; raises ServingError. ``vocabulary`` must come with
        the first."""
        seq = next(self._seq)
        _agreed(await self._ask(PrepareGrammar(seq, spec, vocabulary), seq, _COMPILE_SECONDS))

    def drop_grammar(self, spec: GrammarSpec) -> None:
        """Let the engine forget a grammar that no further request will name."""
        self._send(DropGrammar(spec))

    async def _ask(self, question: Control | GetState | PrepareGrammar, seq: int,
                   timeout: float = _REPLY_SECONDS) -> list[State | Done]:
        if self._dead is not None:
            raise WorkerUnavailable(self._dead)
        answers = self._replies[seq] = _Answers(self._dp_size)
        try:
            self._send(question)
            return await asyncio.wait_for(answers.all, timeout)
        except (TimeoutError, asyncio.TimeoutError):
            raise WorkerUnavailable(f"The engine did not answer within {timeout:g} s.") from None
        finally:
            del self._replies[seq]

    def engine_died(self, reason: str) -> None:
        """Fail all that waits, with WorkerUnavailable, and refuse what comes; ``reason`` is a sentence."""
        self._dead = reason
        self._unsent.clear()
        for rid, stream in list(self._streams.items()):
            self._forget(rid)
            stream._fail(rid, WorkerUnavailable(reason))
        for answers in self._replies.values():
            answers.fail(WorkerUnavailable(reason))

    def shut_down(self) -> None:
        """Tell the ranks to leave their loops."""
        self._send(Shutdown())

    async def close(self) -> None:
        """Close the sockets and remove their folder; the ranks must be gone."""
        self._dead = self._dead or "The server has stopped."
        self._unsent.clear()
        if self._receiver is not None:
            self._receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiver
        self._context.destroy(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)

    # ------------------------------------------------------------------ messages

    def _send(self, message: ToEngine) -> None:
        if self._dead is not None:
            return
        self._unsent.append(encode(message))
        if len(self._unsent) == 1:
            self._send_unsent()

    def _send_unsent(self) -> None:
        """A PUSH socket without a peer refuses messages. Rank 0's connection may still be on its way when its Ready is
        here (another socket brought that), so what is refused is tried again soon."""
        while self._unsent and self._dead is None:
            try:
                self._outbox.send(self._unsent[0], zmq.NOBLOCK)
            except zmq.Again:
                asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._send_unsent)
                return
            self._unsent.popleft()

    async def _receive(self) -> None:
        while True:
            data = await self._inbox.recv()
            self._dispatch(decode_from_engine(data))

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Outputs():
                for output in message.items:
                    self._deliver(output)
            case Failed(rid, code, text):
                stream = self._forget(rid)
                if stream is not None:
                    stream._fail(rid, from_code(code, text))
            case State(seq=seq) | Done(seq=seq):
                answers = self._replies.get(seq)
                if answers is not None:
                    answers.add(message)
            case Loading() | Ready() | StartFailed():
                self._on_startup(message)

    def _deliver(self, output: Output) -> None:
        """An output of an unknown request is of one that ended here before the engine knew; it is dropped."""
        stream = self._streams.get(output.rid)
        if stream is None:
            return
        if self._balancer is not None:
            self._balancer.grew(output.rid, len(output.token_ids))
        if output.finish is not None:
            self._forget(output.rid)
        stream._put(output)


def _agreed(replies: Sequence[State | Done]) -> str:
    """What was done; raises the ServingError with which a part of the engine refused."""
    done = [reply for reply in replies if isinstance(reply, Done)]
    for reply in done:
        if reply.code is not None:
            raise from_code(reply.code, reply.message)
    return done[0].message
