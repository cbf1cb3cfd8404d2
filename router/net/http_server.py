"""The client's side: HTTP/1.1 on a raw protocol.

A connection reads requests and hands complete ones, one at a time, to ``serve``. Whoever serves a
request becomes the connection's ``handler`` until it calls ``done``: it is told when the client
leaves (``cancel``) and when it reads too slowly (``pause``, ``resume``).
"""

from __future__ import annotations

import asyncio
import math
import socket
import struct
from collections.abc import Callable
from typing import Protocol

from ...common.api.errors import ServingError
from .deadlines import BODY_BYTES_PER_SECOND, Deadlines
from .outbox import Outbox
from .request import Request, new_id
from .request_reader import HeadRules, RequestReader
from .responses import Response, SlowRequest

_MAX_WAITING = 32
"""Pipelined requests that wait on one connection before it is read no further, or are answered before it shows whether
their answers are taken."""
_LINGER_SECONDS = 2.0
"""How long a refused upload is still swallowed: closing at once resets the connection, and the client
loses the answer that says why."""

_NO_LINGER = struct.pack("ii", 1, 0)  # closing sends a reset, not a regular end


class Handler(Protocol):
    """Serves one request."""

    def cancel(self) -> None:
        """The client left; nothing may be written any more."""

    def pause(self) -> None:
        """The client reads too slowly: produce no more until ``resume``."""

    def resume(self) -> None: ...

    def expire(self, error: ServingError) -> None:
        """The router stops: end the answer now, with ``error`` as its last word, and call ``done``."""


Serve = Callable[["ClientConnection", Request], None]


class ClientConnection(asyncio.Protocol):
    """One client connection; its requests are served one after another."""

    __slots__ = ("_serve", "_reader", "_open", "_loop", "_serving", "_busy", "_reading_paused", "_heard", "_outbox",
                 "_clogged", "_unread", "_unread_since", "_arriving", "_arrives_since", "_active_at", "_deadlines",
                 "transport", "handler", "closing", "slot")

    transport: asyncio.Transport

    def __init__(self, serve: Serve, *, max_payload: int, connections: set[ClientConnection],
                 loop: asyncio.AbstractEventLoop, rules: HeadRules, outbox: Outbox, deadlines: Deadlines,
                 heard: Callable[[], None] | None = None):
        """``heard`` is called whenever data arrives."""
        self._serve = serve
        self._reader = RequestReader(rules, max_payload)
        self._open = connections
        self._loop = loop
        self._heard = heard
        self._outbox = outbox
        self._serving = self._busy = self._reading_paused = False
        self._clogged = False
        """Whether the client reads too slowly: until it does not, the connection is busy."""
        self._unread = -1
        """Bytes that a clogged client had to read at the last look; they are those since ``_unread_since``."""
        self._unread_since = 0.0
        self.handler: Handler | None = None
        self.closing = False
        self.slot = 0
        self._deadlines = deadlines
        self._active_at = deadlines.now
        """When the last answer ended."""
        self._arriving: Request | None = None
        """The request that has begun to arrive, at ``_arrives_since``."""
        self._arrives_since = 0.0

    # ------------------------------------------------------------------ what a handler uses

    def send(self, data: bytes) -> None:
        """Write a piece of an answer."""
        self._outbox.put(self.transport, data)

    def respond(self, request: Request, response: Response) -> None:
        """Write a complete answer; ``done`` is still to be called."""
        self.send(response.encode(request.request_id, head_only=request.head_only,
                                  close=not request.keep_alive or self.closing, more=request.reply_headers))

    def done(self, *, keep_alive: bool) -> None:
        """The handler finished its answer: serve the next request, or close after the bytes are out."""
        self.handler = None
        self._active_at = self._deadlines.now
        self._busy = self._clogged
        if not keep_alive or self.closing:
            self.closing = True
            self._outbox.close(self.transport)
        elif self._reader.ready and not self._busy:
            self._serve_ready()

    def reset(self) -> None:
        """Cut the connection behind what was sent, so that it is not taken for all; ``done`` is still to be called."""
        self._outbox.flush()
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def close_when_idle(self) -> None:
        """Take no new request; a running one still gets its answer."""
        self.closing = True
        self._reader.ready.clear()
        if self.handler is None:
            self._outbox.close(self.transport)

    def look(self, now: float) -> float:
        """Give up on a client that takes too long to send a request, to take its answer, or to ask again. Returns in
        how many seconds to look again."""
        limits = self._deadlines.limits
        if self._clogged:
            return self._look_at_unread(now, limits.unread)
        if self.closing:
            return math.inf
        reader = self._reader
        if reader.partial is not None and not reader.refused:
            if self._reading_paused or reader.awaits_continue:  # It is we who do not read, or who owe a word.
                self._arrives_since = now
            left = self._arrives_by(reader) - now
            if left > 0:
                return left
            reader.refuse(SlowRequest(f"The request did not arrive within {now - self._arrives_since:.0f} s."))
            self._serve_ready()
        elif self._busy or reader.ready:
            return limits.idle
        elif now - self._active_at > limits.idle:
            self.close_when_idle()
        else:
            return limits.idle - (now - self._active_at)
        return math.inf

    def _look_at_unread(self, now: float, limit: float) -> float:
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread:
            self._unread, self._unread_since = unread, now
        elif now - self._unread_since > limit:
            self.transport.abort()
            return math.inf
        return limit / 4

    def _arrives_by(self, reader: RequestReader) -> float:
        """When the request that is arriving must be here."""
        limits = self._deadlines.limits
        if not reader.in_body:
            return self._arrives_since + limits.header
        return self._arrives_since + limits.body + reader.size / BODY_BYTES_PER_SECOND

    # ------------------------------------------------------------------ callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._open.add(self)
        self._deadlines.watch(self, self._deadlines.limits.idle)

    def data_received(self, data: bytes) -> None:
        if self._heard is not None:
            self._heard()
        reader = self._reader
        if reader.refused or self.closing:
            return
        request = reader.whole(data)
        if request is None:
            reader.feed(data)
            self._look_after(reader)
        elif self._busy or reader.ready:
            reader.ready.append(request)
            self._look_after(reader)
        else:
            self._busy = True
            self._serve(self, request)

    def pause_writing(self) -> None:
        self._clogged = self._busy = True
        self._unread = -1
        self._deadlines.watch(self, self._deadlines.limits.unread / 4)
        if self.handler is not None:
            self.handler.pause()

    def resume_writing(self) -> None:
        self._clogged = False
        if self.handler is not None:
            self.handler.resume()
        else:
            self._busy = False
            self._serve_ready()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self._open.discard(self)
        self._deadlines.drop(self)
        self._reader.close()
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.cancel()

    # ------------------------------------------------------------------ inside

    def _look_after(self, reader: RequestReader) -> None:
        """Go on with what the reader made of new data."""
        if reader.partial is not self._arriving:
            self._arriving, self._arrives_since = reader.partial, self._loop.time()
            if reader.partial is not None:
                self._deadlines.watch(self, min(self._deadlines.limits.header, self._deadlines.limits.body))
        if reader.awaits_continue and not reader.refused and not self._busy and not reader.ready:
            reader.awaits_continue = False
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if reader.ready and not self._busy:
            self._serve_ready()
        if len(reader.ready) > _MAX_WAITING and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def _serve_ready(self) -> None:
        if self._serving:  # Called by done() within serve(): the loop below takes the next one.
            return
        self._serving = True
        ready = self._reader.ready
        served = 0
        while ready and not self._busy and not self.transport.is_closing():
            served += 1
            if served % _MAX_WAITING == 0:
                self._outbox.flush()  # Only what is written shows that its reader does not read.
                continue
            item = ready.popleft()
            if isinstance(item, ServingError):
                self._answer_refusal(item)
                break
            self._busy = True
            self._serve(self, item)
        self._serving = False
        if self._reading_paused and len(ready) <= _MAX_WAITING:
            self._reading_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def _answer_refusal(self, error: ServingError) -> None:
        self.closing = True
        self.send(Response.error(error).encode(new_id(), close=True))
        self._outbox.flush()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._loop.call_later(_LINGER_SECONDS, self.transport.abort)
