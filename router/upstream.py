"""Connections to workers: raw, pooled, and read only as far as framing needs.

An answer's bytes reach the sink as they came. llhttp runs over them to learn where the head and the
message end; nothing is decoded or rebuilt.

Contract with the sink (``Sink``): after ``UpstreamPool.send`` returned (never before), zero or one
``answer_head``, then any number of ``answer_data``, then exactly one of ``answer_end`` and
``answer_lost``. After ``Call.cancel`` nothing comes any more. ``reusable`` is False when the answer told
its reader to close the connection, or ended with it.
"""

from __future__ import annotations

import asyncio
import errno
import ssl

import httptools

from .answer import AnswerHead, Failure, Sink
from .endpoint import Endpoint

IDLE_SECONDS = 4.0
"""uvicorn closes a connection that idles for 5 s; one used later than this may be closed under our request."""
_MAX_HEAD = 128 * 1024
_NOBODY_THERE = frozenset((errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH))
"""Not among them: what we lack ourselves (descriptors, ports), which must not take every worker out."""
_JOINED = 16 * 1024
"""Bodies up to this are copied behind their head: a second buffer costs more than so small a copy."""


class Call:
    """One request on one worker, from ``UpstreamPool.send`` to its end."""

    __slots__ = ("pool", "sink", "head", "body", "bodiless", "resend", "connection", "connecting", "paused")

    def __init__(self, pool: UpstreamPool, sink: Sink, head: bytes, body: bytes, bodiless: bool, resend: bool):
        self.pool = pool
        self.sink: Sink | None = sink
        self.head = head
        self.body = body
        self.bodiless = bodiless
        """The answer to a HEAD request ends with its head, whatever Content-Length says."""
        self.resend = resend
        """Whether to send again, on a new connection, what met a stale idle one."""
        self.connection: UpstreamConnection | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.paused = False

    def cancel(self) -> None:
        """Drop the call: the worker sees its connection close, the sink hears nothing more. Idempotent."""
        self.sink = None
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None
        if self.connection is not None:
            self.connection.abandon()

    def pause(self) -> None:
        """Stop reading from the worker: its socket fills up, and it waits."""
        if self.paused:
            return
        self.paused = True
        if self.connection is not None:
            self.connection.transport.pause_reading()

    def resume(self) -> None:
        if not self.paused:
            return
        self.paused = False
        if self.connection is not None:
            self.connection.heard_at = self.pool.loop.time()
            self.connection.transport.resume_reading()

    def ended(self, reusable: bool) -> None:
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.answer_end(reusable=reusable)

    def lost(self, failure: Failure) -> None:
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.answer_lost(failure)


class UpstreamConnection(asyncio.Protocol):
    """One keep-alive connection to a worker; carries one call at a time."""

    __slots__ = ("_pool", "_parser", "_pending", "_head", "_head_complete", "_done", "_keep_alive", "transport",
                 "call", "reused", "heard_at", "idle_since")

    transport: asyncio.Transport

    def __init__(self, pool: UpstreamPool):
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._pending = b""
        self._head: AnswerHead | None = None
        self._head_complete = self._done = self._keep_alive = False
        self.call: Call | None = None
        self.reused = False
        self.heard_at = self.idle_since = 0.0

    def carry(self, call: Call) -> None:
        """Send a call's request and deliver its answer."""
        self.call = call
        call.connection = self
        self._pending = b""
        self._head = None
        self._head_complete = self._done = False
        self.heard_at = self._pool.loop.time()
        self._pool.busy.add(self)
        if call.paused:
            self.transport.pause_reading()
        if len(call.body) > _JOINED:
            self.transport.writelines((call.head, call.body))
        else:
            self.transport.write(call.head + call.body)

    def abandon(self) -> None:
        """Cut the connection; a worker notices at its next read or write."""
        self._detach()
        self.transport.abort()

    def fail(self, failure: Failure) -> None:
        """End the call with a failure and cut the connection."""
        call = self.call
        self.abandon()
        if call is not None:
            call.lost(failure._replace(at_boundary=self._at_boundary()))

    def _detach(self) -> None:
        self._pool.busy.discard(self)
        if self.call is not None:
            self.call.connection = None
            self.call = None

    # ------------------------------------------------------------------ callbacks of the parser

    def on_headers_complete(self) -> None:
        self._head_complete = True

    def on_message_complete(self) -> None:
        self._done = True
        self._keep_alive = self._parser.should_keep_alive()  # Only here: the parser forgets it right after.

    # ------------------------------------------------------------------ callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        call = self.call
        if call is None:  # A worker that talks unasked: nothing it says belongs to a request.
            self.transport.abort()
            return
        self.heard_at = self._pool.loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(Failure("malformed", f"{self._pool.url} sent a malformed answer ({error})"))
            return
        if self._head is None:
            self._read_head(call, data)
        elif call.sink is not None:
            call.sink.answer_data(data)
        if self._done and self.call is call:
            self._finish(call)

    def _read_head(self, call: Call, data: bytes) -> None:
        if self._pending:
            data = self._pending + data
        if not self._head_complete:
            self._pending = data
            if len(data) > _MAX_HEAD:
                self.fail(Failure("malformed", f"{self._pool.url} sent a head of more than {_MAX_HEAD} bytes"))
            return
        status = self._parser.get_status_code()
        size = data.find(b"\r\n\r\n") + 4
        if status < 200 or size < 4:  # An interim answer, which our requests never ask for.
            self.fail(Failure("malformed", f"{self._pool.url} sent an answer that cannot be relayed (status {status})"))
            return
        self._pending = call.body = b""
        self._head = head = AnswerHead(status, data, size)
        if call.bodiless:
            self._done, self._keep_alive = True, False  # The parser waits for a body, so the connection is spent.
        if call.sink is not None:
            call.sink.answer_head(head)

    def _finish(self, call: Call) -> None:
        reusable = self._keep_alive
        self._detach()
        if reusable and not call.paused:
            self._pool.park(self)
        else:
            self.transport.close()
        call.ended(reusable)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.unpark(self)
        call = self.call
        if call is not None:
            self._detach()
            self._lose(call, exc)
        self._parser = None  # type: ignore[assignment]  # It holds us: a cycle that only a rare collection would end.

    def _lose(self, call: Call, exc: Exception | None) -> None:
        if self._head is None and not self._pending and self.reused and call.sink is not None:
            # The worker closed the idle connection while our request was on its way: not its failure.
            if call.resend:
                self._pool.connect(call)
            else:
                call.lost(Failure("stale", f"{self._pool.url} closed an idle connection"))
        elif self._head is not None and not self._head.delimited and exc is None:
            call.ended(False)
        else:
            call.lost(Failure("lost", f"{self._pool.url} closed the connection before the end of its answer",
                              at_boundary=self._at_boundary()))

    def _at_boundary(self) -> bool:
        """Whether a broken answer stopped where an event may be put: between two chunks.

        The parser does not tell; but between chunks, and only there, a last chunk ends the message.
        """
        if self._head is None or not self._head.chunked:
            return self._head is not None and not self._head.delimited
        self._done = False
        try:
            self._parser.feed_data(b"0\r\n\r\n")
        except httptools.HttpParserError:
            return False
        return self._done


class UpstreamPool:
    """The connections to one worker; idle ones are reused newest first and dropped after IDLE_SECONDS."""

    def __init__(self, endpoint: Endpoint, *, connect_timeout: float, authorization: bytes = b"",
                 tls: ssl.SSLContext | None = None, loop: asyncio.AbstractEventLoop | None = None):
        self.endpoint = endpoint
        self.url = endpoint.url
        self.host_line = b"host: " + endpoint.authority.encode() + b"\r\n"
        self.prefix = endpoint.prefix.encode()
        self.authorization = authorization
        """The header line of the worker's key, in place of the client's; empty: the client's goes through."""
        self.loop = loop or asyncio.get_running_loop()
        self.busy: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []
        self._connect_timeout = connect_timeout
        self._tls = tls
        self._closed = False

    def send(self, sink: Sink, head: bytes, body: bytes, *, bodiless: bool = False, resend: bool = True) -> Call:
        """Send a request, given as its bytes; the answer goes to ``sink``, nothing of it before this returns."""
        call = Call(self, sink, head, body, bodiless, resend)
        connection = self._take()
        if connection is not None:
            connection.carry(call)
        else:
            self.connect(call)
        return call

    def connect(self, call: Call) -> None:
        """Carry a call on a new connection."""
        call.connecting = self.loop.create_task(self._connect(call))

    def park(self, connection: UpstreamConnection) -> None:
        if self._closed:
            connection.transport.close()
            return
        connection.reused = True
        connection.idle_since = self.loop.time()
        self._idle.append(connection)

    def unpark(self, connection: UpstreamConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def cut(self, failure: Failure) -> None:
        """Fail all calls that have a connection."""
        for connection in list(self.busy):
            connection.fail(failure)

    def close(self) -> None:
        """Drop the idle connections, and busy ones as soon as their answer ended."""
        self._closed = True
        while self._idle:
            self._idle.pop().transport.close()

    def sweep(self, silence_limit: float) -> None:
        """Drop connections that idle too long, and fail calls whose worker is silent for ``silence_limit`` s.

        A call that is paused is not silent: it is us who do not read.
        """
        now = self.loop.time()
        while self._idle and now - self._idle[0].idle_since > IDLE_SECONDS:
            self._idle.pop(0).transport.close()
        if not silence_limit:
            return
        for connection in list(self.busy):
            if now - connection.heard_at > silence_limit and connection.call and not connection.call.paused:
                connection.fail(Failure("silent", f"{self.url} sent nothing for {silence_limit:g} s"))

    def _take(self) -> UpstreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if self.loop.time() - connection.idle_since <= IDLE_SECONDS and not connection.transport.is_closing():
                return connection
            connection.transport.close()
        return None

    async def _connect(self, call: Call) -> None:
        host, port = self.endpoint.host, self.endpoint.port
        try:
            _, connection = await asyncio.wait_for(
                self.loop.create_connection(lambda: UpstreamConnection(self), host, port, ssl=self._tls),
                self._connect_timeout)
        except (OSError, asyncio.TimeoutError) as error:
            call.connecting = None
            detail = "no answer" if isinstance(error, asyncio.TimeoutError) else (error.strerror or str(error))
            call.lost(Failure("connect", f"cannot connect to {self.url}: {detail}",
                              refused=isinstance(error, OSError) and error.errno in _NOBODY_THERE))
            return
        call.connecting = None
        connection.carry(call)
