"""The connections to one worker."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable

import httptools

from ..config.endpoint import Endpoint
from .heads import KnownHeads
from .outbox import Bytes, Outbox
from .upstream import Call, UpstreamConnection
from .upstream_answer import ENGINE_DEAD, AnswerFacts, Failure, Sink

IDLE_SECONDS = 3.0
"""uvicorn closes a connection that idles for 5 s; one used later than that may be closed under our request. Counted
from the sweep before it became idle, so none idles longer than this and a second."""
_NOBODY_THERE = frozenset((errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH))
"""Not among them: what we lack ourselves (descriptors, ports), which must not take every worker out."""


class _Probe:
    """llhttp's view of one answer, for ``plain_answer``."""

    def __init__(self) -> None:
        self.head_complete = self.reusable = False
        self.body = b""
        self.messages = 0
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.head_complete = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.messages += 1
        self.reusable = self.parser.should_keep_alive()


def plain_answer(head: bytes) -> AnswerFacts | None:
    """What ``KnownHeads.read`` is for answers: see there. The last words of an engine are read each time."""
    if ENGINE_DEAD in head.lower():
        return None
    probe = _Probe()
    try:
        probe.parser.feed_data(head)
        if not probe.head_complete or probe.body or probe.messages:
            return None
        facts = AnswerFacts.read(probe.parser.get_status_code(), head)
        probe.parser.feed_data(b"x")
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    plain = probe.messages == 1 and probe.body == b"x" and probe.reusable and facts.status >= 200 and not facts.chunked
    return facts if plain else None


class UpstreamPool:
    """The connections to one worker; idle ones are reused newest first and dropped after IDLE_SECONDS."""

    def __init__(self, endpoint: Endpoint, *, connect_timeout: float, authorization: bytes = b"",
                 tls: ssl.SSLContext | None = None, known: KnownHeads[AnswerFacts] | None = None,
                 outbox: Outbox, heard: Callable[[], None] | None = None):
        """``heard`` is called whenever data arrives."""
        self.heard = heard
        self.endpoint = endpoint
        self.url = endpoint.url
        self.host_line = b"host: " + endpoint.authority.encode() + b"\r\n"
        self.prefix = endpoint.prefix.encode()
        self.authorization = authorization
        """The header line of the worker's key, in place of the client's; empty: the client's goes through."""
        self.loop = asyncio.get_running_loop()
        self.outbox = outbox
        self.known = known if known is not None else KnownHeads(plain_answer)
        """Heads of answers met before; workers of one kind may share them."""
        self.connections: set[UpstreamConnection] = set()
        self._connecting: set[Call] = set()
        self._idle: list[UpstreamConnection] = []
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._closed = False
        self._swept_at = self.loop.time()

    def send(self, sink: Sink, head: bytes, body: tuple[Bytes, ...], bodiless: bool = False,
             resend: bool = True) -> Call:
        """Send a request, given as its bytes (a large body in parts of its own); the answer goes to ``sink``, nothing
        of it before this returns."""
        call = Call(self, sink, head, body, bodiless, resend)
        if self._idle:
            self._idle.pop().carry(call)
        else:
            self.connect(call)
        return call

    def connect(self, call: Call) -> None:
        """Carry a call on a new connection."""
        call.connecting = self.loop.create_task(self._connect(call))

    @property
    def busy(self) -> list[UpstreamConnection]:
        """The connections that carry calls."""
        return [connection for connection in self.connections if connection.call is not None]

    def park(self, connection: UpstreamConnection) -> None:
        if self._closed:
            connection.transport.close()
            return
        connection.reused = True
        connection.idle_since = self._swept_at
        self._idle.append(connection)

    def unpark(self, connection: UpstreamConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def cut(self, failure: Failure) -> None:
        """Fail all calls."""
        for connection in self.busy:
            connection.fail(failure)
        for call in list(self._connecting):
            if call.connecting is not None:
                call.connecting.cancel()
                call.connecting = None
                call.lost(failure)

    def close(self) -> None:
        """Drop the idle connections, and busy ones as soon as their answer ended."""
        self._closed = True
        while self._idle:
            self._idle.pop().transport.close()

    def sweep(self, silence_limit: float) -> None:
        """Drop connections that idle too long, and fail calls whose worker is silent for ``silence_limit`` s.

        Called every second or so. A call that is paused is not silent: it is us who do not read.
        """
        self._swept_at = now = self.loop.time()
        while self._idle and now - self._idle[0].idle_since > IDLE_SECONDS:
            self._idle.pop(0).transport.close()
        self._note_silence(now)
        for connection in self.busy:
            if silence_limit and now - connection.silent_since > silence_limit:
                connection.fail(Failure("silent", f"{self.url} sent nothing for {silence_limit:g} s"))

    def end_silent(self, limit: float) -> None:
        """Fail calls that have been silent for ``limit`` seconds: the worker is hung. Nothing that it sends of them
        when it wakes up reaches anybody."""
        now = self.loop.time()
        self._note_silence(now)
        for connection in self.busy:
            if now - connection.silent_since > limit:
                connection.fail(Failure("hung", f"{self.url} hangs, and sent nothing for {limit:g} s"))

    def heard_since(self, when: float) -> bool:
        """Whether more of an answer came after ``when``, a moment at which ``note_silence`` was called or later."""
        return any(connection.answering and (connection.heard or connection.silent_since > when)
                   for connection in self.busy)

    def note_silence(self) -> None:
        """From now on ``heard_since`` can tell."""
        self._note_silence(self.loop.time())

    def _note_silence(self, now: float) -> None:
        for connection in self.busy:
            if connection.heard or connection.call is None or connection.call.paused:
                connection.heard = False
                connection.silent_since = now

    async def _connect(self, call: Call) -> None:
        self._connecting.add(call)
        try:
            connection = await self._open(call)
        finally:
            self._connecting.discard(call)
        if connection is None:
            return
        call.connecting = None
        if call.sink is None:  # Cancelled as the connection came: wait_for may return it all the same (Python < 3.12).
            connection.transport.abort()
        elif connection.transport.is_closing():  # Lost before it could carry anything; nobody would tell the call.
            call.lost(Failure("lost" if call.stale else "connect", f"{self.url} closed a new connection at once"))
        elif call.stale and not call.resend:
            self.park(connection)
            call.lost(Failure("stale", f"{self.url} closed an idle connection"))
        else:
            connection.carry(call)

    async def _open(self, call: Call) -> UpstreamConnection | None:
        """A new connection; None where there is none, which the call has been told."""
        host, port = self.endpoint.host, self.endpoint.port
        try:
            _, connection = await asyncio.wait_for(
                self.loop.create_connection(lambda: UpstreamConnection(self), host, port, ssl=self._tls),
                self._connect_timeout)
        except (OSError, asyncio.TimeoutError) as error:
            call.connecting = None
            detail = "no answer" if isinstance(error, asyncio.TimeoutError) else (error.strerror or str(error))
            refused = isinstance(error, OSError) and error.errno in _NOBODY_THERE
            if call.stale:
                call.lost(Failure("lost", f"{self.url} died under a request: {detail}", refused=refused))
            else:
                call.lost(Failure("connect", f"cannot connect to {self.url}: {detail}", refused=refused))
            return None
        return connection
