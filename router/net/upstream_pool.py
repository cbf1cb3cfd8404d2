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
from .upstream_response import ENGINE_DEAD, Failure, ResponseFacts, ResponseSink

IDLE_SECONDS = 3.0
"""The time for which a connection may idle: uvicorn closes one after 5 s, perhaps just as our request is sent on it.
Counted from the sweep before it became idle, so none idles longer than this and a second."""
_UNREACHABLE_ERRNOS = frozenset((errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH))
"""Errors that prove that no server listens. A lack of our own (descriptors, ports) is not among them: it must not take
every worker out of service."""


class _Probe:
    """llhttp's view of one response, for ``read_plain_response``."""

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

    @property
    def is_plain(self) -> bool:
        """True if the head announced a body of one byte, which has come, and nothing else."""
        return self.messages == 1 and self.body == b"x" and self.reusable


def read_plain_response(head: bytes) -> ResponseFacts | None:
    """The ``read`` of ``KnownHeads`` for responses; None for an engine's last words, which are parsed each time."""
    if ENGINE_DEAD in head.lower():
        return None
    probe = _Probe()
    try:
        probe.parser.feed_data(head)
        if not probe.head_complete or probe.body or probe.messages:
            return None
        facts = ResponseFacts.read(probe.parser.get_status_code(), head)
        probe.parser.feed_data(b"x")
    except (httptools.HttpParserError, httptools.HttpParserUpgrade):
        return None
    return facts if probe.is_plain and facts.status >= 200 and not facts.chunked else None


class UpstreamPool:
    """The connections to one worker; idle ones are reused newest first and dropped after IDLE_SECONDS."""

    def __init__(self, endpoint: Endpoint, *, connect_timeout: float, authorization: bytes = b"",
                 tls: ssl.SSLContext | None = None, known_heads: KnownHeads[ResponseFacts] | None = None,
                 outbox: Outbox, on_data: Callable[[], None] | None = None):
        """``on_data`` is called whenever data arrives."""
        self.on_data = on_data
        self.endpoint = endpoint
        self.url = endpoint.url
        self.host_line = b"host: " + endpoint.authority.encode() + b"\r\n"
        self.prefix = endpoint.prefix.encode()
        self.authorization = authorization
        """The header line of the worker's key, which replaces the client's; empty: the client's is forwarded."""
        self.loop = asyncio.get_running_loop()
        self.outbox = outbox
        self.known_heads = known_heads if known_heads is not None else KnownHeads(read_plain_response)
        """Response heads that were parsed before; workers may share them."""
        self.connections: set[UpstreamConnection] = set()
        self._connecting: set[Call] = set()
        self._idle: list[UpstreamConnection] = []
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._closed = False
        self._swept_at = self.loop.time()

    def send(self, sink: ResponseSink, head: bytes, body: tuple[Bytes, ...], bodiless: bool = False,
             resend: bool = True) -> Call:
        """Send a request, given as its bytes (a large body as separate parts). The response goes to ``sink``, but not
        before this returns."""
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

    def fail_calls(self, failure: Failure) -> None:
        """Fail all calls."""
        for connection in self.busy:
            connection.fail(failure)
        for call in list(self._connecting):
            if call.connecting is not None:
                call.connecting.cancel()
                call.connecting = None
                call.lost(failure)

    def close(self) -> None:
        """Close the idle connections, and busy ones as soon as their response has ended."""
        self._closed = True
        while self._idle:
            self._idle.pop().transport.close()

    def sweep(self, silence_limit: float) -> None:
        """Close connections that idle too long, and fail calls whose worker is silent for ``silence_limit`` seconds.

        Called every second or so. A call that is paused is not silent: the router does not read.
        """
        self._swept_at = now = self.loop.time()
        while self._idle and now - self._idle[0].idle_since > IDLE_SECONDS:
            self._idle.pop(0).transport.close()
        self._update_silence(now)
        for connection in self.busy:
            if silence_limit and now - connection.silent_since > silence_limit:
                connection.fail(Failure("silent", f"{self.url} sent nothing for {silence_limit:g} s"))

    def fail_silent_calls(self, limit: float) -> None:
        """Fail calls that have been silent for ``limit`` seconds: the worker is hung. What it sends of them when it
        wakes up reaches no client."""
        now = self.loop.time()
        self._update_silence(now)
        for connection in self.busy:
            if now - connection.silent_since > limit:
                connection.fail(Failure("hung", f"{self.url} hangs, and sent nothing for {limit:g} s"))

    def received_since(self, when: float) -> bool:
        """True if more of a response came after ``when``, a time at which ``update_silence`` was called or later."""
        return any(connection.has_response and (connection.active or connection.silent_since > when)
                   for connection in self.busy)

    def update_silence(self) -> None:
        """Note which calls have been silent since the last time, so that ``received_since`` can tell."""
        self._update_silence(self.loop.time())

    def _update_silence(self, now: float) -> None:
        for connection in self.busy:
            if connection.active or connection.call is None or connection.call.paused:
                connection.active = False
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
        elif connection.transport.is_closing():  # Lost before it could carry the call, which would never be failed.
            call.lost(Failure("lost" if call.stale else "connect", f"{self.url} closed a new connection at once"))
        elif call.stale and not call.resend:
            self.park(connection)
            call.lost(Failure("stale", f"{self.url} closed an idle connection"))
        else:
            connection.carry(call)

    async def _open(self, call: Call) -> UpstreamConnection | None:
        """Open a new connection; returns None after the call has failed."""
        host, port = self.endpoint.host, self.endpoint.port
        try:
            _, connection = await asyncio.wait_for(
                self.loop.create_connection(lambda: UpstreamConnection(self), host, port, ssl=self._tls),
                self._connect_timeout)
        except (OSError, asyncio.TimeoutError) as error:
            call.connecting = None
            detail = "no answer" if isinstance(error, asyncio.TimeoutError) else (error.strerror or str(error))
            refused = isinstance(error, OSError) and error.errno in _UNREACHABLE_ERRNOS
            if call.stale:
                call.lost(Failure("lost", f"{self.url} died under a request: {detail}", refused=refused))
            else:
                call.lost(Failure("connect", f"cannot connect to {self.url}: {detail}", refused=refused))
            return None
        return connection
