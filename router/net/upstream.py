"""A connection to a worker: raw, and parsed only as far as framing needs.

A response's bytes reach the sink as they came; nothing is decoded or rebuilt. The bytes of a response with a known head
(``KnownHeads``) are counted; llhttp parses all others to find where head and message end.

Contract with the sink (``ResponseSink``): after ``UpstreamPool.send`` returned (never before), zero or one
``on_response_head``, then any number of ``on_response_data``, then exactly one of ``on_response_end`` and
``on_response_lost``. After ``Call.cancel`` nothing comes any more. ``reusable`` is False when the response asked
to close the connection, or ended with it.

A response of up to ``MAX_BUFFERED_BYTES`` that is no stream reaches the sink complete, in its ``on_response_head``, or
not at all: one that breaks off in the middle is as good as none, and can be requested of another worker.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Protocol

import httptools
import msgspec

from .heads import KnownHead, KnownHeads
from .outbox import Bytes, Outbox
from .upstream_response import ENGINE_DEAD, Failure, ResponseFacts, ResponseHead, ResponseSink, engine_died

_MAX_HEAD_BYTES = 128 * 1024
MAX_BUFFERED_BYTES = 1024 * 1024
"""The longest response, head included, that is buffered until it is complete. A chat response has some 5 bytes a token,
with five log-probabilities each 600; 1,000 incomplete responses of this size take 1 GiB of a router."""
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,15})[ \t]*\r\n", re.IGNORECASE)


def _is_buffered(head: ResponseHead) -> bool:
    """True if a response is to be buffered until its end: it is no stream, and announces no more than the limit.

    Of chunked responses only JSON is: anything else may be a stream of an unknown form.
    """
    facts = head.facts
    if facts.event_stream or not facts.delimited:
        return False
    if facts.chunked:
        return facts.json
    found = _LENGTH.search(head.data, 0, head.size)
    return found is not None and head.size + int(found[1]) <= MAX_BUFFERED_BYTES


class Home(Protocol):
    """The pool of a connection, as the connection needs it."""

    url: str
    known_heads: KnownHeads[ResponseFacts]
    connections: set[UpstreamConnection]
    on_data: Callable[[], None] | None
    """Called whenever data arrives."""
    outbox: Outbox

    def park(self, connection: UpstreamConnection) -> None:
        """Take an idle connection back, to carry another call."""

    def unpark(self, connection: UpstreamConnection) -> None:
        """Let a connection carry no call any more."""

    def connect(self, call: Call) -> None:
        """Carry a call on a new connection."""


class Call(msgspec.Struct, eq=False):
    """One request on one worker, from ``UpstreamPool.send`` to its end."""

    pool: Home
    sink: ResponseSink | None
    head: bytes
    """The head, and with it the body, unless that is large."""
    body: tuple[Bytes, ...]
    """The parts of a large body."""
    bodiless: bool
    """True for a HEAD request: its response ends with the head, whatever Content-Length says."""
    resend: bool
    """True: after a stale idle connection, the call is sent again on a new one; else it is lost as "stale"."""
    connection: UpstreamConnection | None = None
    connecting: asyncio.Task[None] | None = None
    paused: bool = False
    stale: bool = False
    """True if the call was sent on an idle connection that was lost at once; the worker may be there or not."""

    def cancel(self) -> None:
        """Drop the call: the worker sees its connection close, the sink gets nothing more. Idempotent."""
        self.sink = None
        if self.connecting is not None:
            self.connecting.cancel()
            self.connecting = None
        if self.connection is not None:
            self.connection.abandon()

    @property
    def at_boundary(self) -> bool:
        """True if the response so far ends where one more event may follow. No more of it can be read afterwards."""
        return self.connection is not None and self.connection.at_boundary()

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
            self.connection.active = True
            self.connection.transport.resume_reading()

    def ended(self, reusable: bool) -> None:
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.on_response_end(reusable=reusable)

    def lost(self, failure: Failure) -> None:
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.on_response_lost(failure)


class UpstreamConnection(asyncio.Protocol):
    """One keep-alive connection to a worker; carries one call at a time."""

    __slots__ = ("_pool", "_parser", "_pending", "_head", "_head_complete", "_missing", "_done", "_keep_alive",
                 "_buffered", "_buffered_size", "transport", "call", "reused", "active", "silent_since",
                 "idle_since", "_last_head")

    transport: asyncio.Transport

    def __init__(self, pool: Home):
        self._pool = pool
        self._parser = httptools.HttpResponseParser(self)
        self._pending = b""
        self._head: ResponseHead | None = None
        self._head_complete = self._done = self._keep_alive = False
        self._buffered: list[bytes] | None = None
        """The chunks so far of a response that is buffered."""
        self._buffered_size = 0
        self._missing = 0
        """Bytes to come of a response with a known head, which the parser does not see."""
        self.call: Call | None = None
        self.reused = False
        self.active = True
        """True if anything came, or was sent, since the last sweep: cheaper than a time noted with each chunk."""
        self.silent_since = self.idle_since = 0.0
        self._last_head: KnownHead[ResponseFacts] | None = None

    def carry(self, call: Call) -> None:
        """Send a call's request and deliver its response."""
        self.call = call
        call.connection = self
        self.active = True
        if call.paused:
            self.transport.pause_reading()
        if call.body:
            self._pool.outbox.put(self.transport, (call.head, *call.body))
        else:
            self._pool.outbox.put(self.transport, call.head)

    @property
    def has_response(self) -> bool:
        """True once a response has begun."""
        return self._head is not None

    def abandon(self) -> None:
        """Abort the connection; a worker notices at its next read or write."""
        self._detach()
        self.transport.abort()

    def fail(self, failure: Failure) -> None:
        """Fail the call and abort the connection."""
        call = self.call
        self.abandon()
        if call is not None:
            call.lost(failure._replace(at_boundary=self.at_boundary()))

    def _detach(self) -> None:
        if self.call is not None:
            self.call.connection = None
            self.call = None

    # ------------------------------------------------------------------ callbacks of the parser

    def on_message_begin(self) -> None:
        if self._done:  # A second response to one request would be relayed as part of the first.
            raise ValueError("more than one response")

    def on_headers_complete(self) -> None:
        self._head_complete = True

    def on_message_complete(self) -> None:
        self._done = True
        self._keep_alive = self._parser.should_keep_alive()  # Only here: the parser forgets it right after.

    # ------------------------------------------------------------------ callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._pool.connections.add(self)

    def data_received(self, data: bytes) -> None:
        if (on_data := self._pool.on_data) is not None:
            on_data()
        call = self.call
        if call is None:  # A worker that sends unasked: nothing of it belongs to a request.
            self.transport.abort()
            return
        self.active = True
        if self._head is None:
            if not self._pending and not call.bodiless and (
                    found := self._pool.known_heads.find(data, self._last_head)) is not None:
                self._last_head, size, length = found
                missing = length + size - len(data)
                if missing >= 0:
                    self._missing = missing
                    self._head = head = ResponseHead(self._last_head.fact, data, size, not missing)
                    call.head = b""
                    if missing and size + length <= MAX_BUFFERED_BYTES and not head.facts.event_stream:
                        self._buffered, self._buffered_size = [data], len(data)
                    elif call.sink is not None:
                        call.sink.on_response_head(head)
                    if not missing and self.call is call:
                        self._finish(call, True)
                    return
        elif self._missing:
            self._count(call, data)
            return
        self._parse(call, data)

    def _count(self, call: Call, data: bytes) -> None:
        """Take in more of a response with a known head."""
        missing = self._missing - len(data)
        if missing < 0:
            self.fail(Failure("malformed", f"{self._pool.url} sent more than it announced"))
            return
        self._missing = missing
        self._deliver(call, data, last=not missing)
        if not missing and self.call is call:
            self._finish(call, True)

    def _deliver(self, call: Call, data: bytes, *, last: bool) -> None:
        """Pass more of a body to the sink, or buffer it until the ``last`` chunk."""
        if (buffered := self._buffered) is None:
            if call.sink is not None:
                call.sink.on_response_data(data)
            return
        buffered.append(data)
        self._buffered_size += len(data)
        if last or self._buffered_size > MAX_BUFFERED_BYTES:
            head, self._buffered = self._head, None
            head.data, head.complete = b"".join(buffered), last  # type: ignore[union-attr]  # it has come
            if call.sink is not None:
                call.sink.on_response_head(head)  # type: ignore[arg-type]

    def _parse(self, call: Call, data: bytes) -> None:
        """Take in more of any other response."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(Failure("malformed", f"{self._pool.url} sent a malformed response ({error})"))
            return
        if self._head is None:
            self._read_head(call, data)
        else:
            self._deliver(call, data, last=self._done)
        if self._done and self.call is call:
            self._done = self._head_complete = False
            self._finish(call, self._keep_alive)

    def _read_head(self, call: Call, data: bytes) -> None:
        if self._pending:
            data = self._pending + data
        if not self._head_complete:
            self._pending = data
            if len(data) > _MAX_HEAD_BYTES:
                self.fail(Failure("malformed", f"{self._pool.url} sent a head of more than {_MAX_HEAD_BYTES} bytes"))
            return
        status = self._parser.get_status_code()
        size = data.find(b"\r\n\r\n") + 4
        if status < 200 or size < 4:  # An interim response, which our requests never ask for.
            self.fail(Failure("malformed", f"{self._pool.url} sent a response that cannot be relayed ({status})"))
            return
        self._pending = call.head = b""
        call.body = ()
        if status == 503 and ENGINE_DEAD in data[:size].lower():  # as if its process were gone, which it soon will be
            self.fail(engine_died(self._pool.url))
            return
        self._head = head = ResponseHead(ResponseFacts.read(status, data[:size]), data, size)
        if call.bodiless:
            self._done, self._keep_alive = True, False  # The parser waits for a body, so the connection is spent.
        if not self._done and _is_buffered(head):
            self._buffered, self._buffered_size = [data], len(data)
        elif call.sink is not None:
            call.sink.on_response_head(head)

    def _finish(self, call: Call, reusable: bool) -> None:
        self._head = self.call = call.connection = self._buffered = None
        if reusable and not call.paused:
            self._pool.park(self)
        else:
            self.transport.close()
        sink, call.sink = call.sink, None
        if sink is not None:
            sink.on_response_end(reusable=reusable)

    def eof_received(self) -> None:
        """Take the connection out of the pool: the worker closes it, so no call may be sent on it."""
        self._pool.unpark(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.unpark(self)
        self._pool.connections.discard(self)
        call = self.call
        if call is not None:
            self._detach()
            self._lose(call, exc)
        self._parser = None  # type: ignore[assignment]  # It refers to us: a cycle that only the collector would free.

    def _lose(self, call: Call, exc: Exception | None) -> None:
        if self._head is None and not self._pending and self.reused and self.active and call.sink is not None:
            # Lost at once: the worker may have closed the idle connection while our request was on its way, which is no
            # failure. Or it died while it had the request: then a new connection is refused.
            call.stale = True
            self._pool.connect(call)
        elif self._head is not None and not self._head.facts.delimited and exc is None:
            call.ended(False)
        else:
            call.lost(Failure("lost", f"{self._pool.url} closed the connection before the end of its response",
                              at_boundary=self.at_boundary()))

    def at_boundary(self) -> bool:
        """True if a broken response stopped where an event may be added: between two chunks.

        The parser does not say so; but between chunks, and only there, a last chunk ends the message. Nothing can be
        parsed any more afterwards.
        """
        if self._head is None or not self._head.facts.chunked:
            return self._head is not None and not self._head.facts.delimited
        self._done = False
        try:
            self._parser.feed_data(b"0\r\n\r\n")
        except httptools.HttpParserError:
            return False
        return self._done
