"""HTTP/1.1 connections of clients, on a raw asyncio protocol.

A connection parses requests and passes complete ones, one at a time, to ``serve``. An object that serves a
request becomes the connection's ``handler`` until it calls ``done``. The handler is called when the client
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
from .request import Request, new_request_id
from .request_reader import HeadRules, RequestReader
from .responses import Response, SlowRequest

_MAX_PIPELINED = 32
"""Pipelined requests that may wait on one connection before reading stops; after as many responses in one go, they are
written, which shows if the client reads them."""
_LINGER_SECONDS = 2.0
"""The time for which a refused upload is still read: closing at once would reset the connection, and the client would
lose the response that has the reason."""

_NO_LINGER = struct.pack("ii", 1, 0)  # Closing sends a reset, not a regular end.


class Handler(Protocol):
    """Serves one request."""

    def cancel(self) -> None:
        """Stop: the client left, and nothing may be written any more."""

    def pause(self) -> None:
        """Produce no more until ``resume``: the client reads too slowly."""

    def resume(self) -> None: ...

    def expire(self, error: ServingError) -> None:
        """End the response now, with ``error``, and call ``done``: the router stops."""


Serve = Callable[["ClientConnection", Request], None]


class ClientConnection(asyncio.Protocol):
    """One client connection; its requests are served one after another."""

    __slots__ = ("_serve", "_reader", "_connections", "_loop", "_serving", "_busy", "_reading_paused", "_on_data",
                 "_outbox", "_writing_paused", "_unread", "_unread_since", "_arriving", "_arriving_since", "_active_at",
                 "_deadlines", "transport", "handler", "closing", "slot")

    transport: asyncio.Transport

    def __init__(self, serve: Serve, *, max_payload: int, connections: set[ClientConnection],
                 loop: asyncio.AbstractEventLoop, rules: HeadRules, outbox: Outbox, deadlines: Deadlines,
                 on_data: Callable[[], None] | None = None):
        """``on_data`` is called whenever data arrives."""
        self._serve = serve
        self._reader = RequestReader(rules, max_payload)
        self._connections = connections
        self._loop = loop
        self._on_data = on_data
        self._outbox = outbox
        self._serving = self._busy = self._reading_paused = False
        self._writing_paused = False
        """True while the client reads too slowly, in which time the connection is busy."""
        self._unread = -1
        """Bytes that a slow client had not read at the last check; their number is the same since ``_unread_since``."""
        self._unread_since = 0.0
        self.handler: Handler | None = None
        self.closing = False
        self.slot = 0
        self._deadlines = deadlines
        self._active_at = deadlines.now
        """The time at which the last response ended."""
        self._arriving: Request | None = None
        """The request that has begun to arrive, at ``_arriving_since``."""
        self._arriving_since = 0.0

    # ------------------------------------------------------------------ what a handler uses

    def send(self, data: bytes) -> None:
        """Write a part of a response."""
        self._outbox.put(self.transport, data)

    def respond(self, request: Request, response: Response) -> None:
        """Write a complete response; ``done`` is still to be called."""
        self.send(response.encode(request.request_id, head_only=request.head_only,
                                  close=not request.keep_alive or self.closing, header_lines=request.reply_headers))

    def done(self, *, keep_alive: bool) -> None:
        """Finish the handler's response: serve the next request, or close after the bytes are written."""
        self.handler = None
        self._active_at = self._deadlines.now
        self._busy = self._writing_paused
        if not keep_alive or self.closing:
            self.closing = True
            self._outbox.close(self.transport)
        elif self._reader.ready and not self._busy:
            self._serve_ready()

    def reset(self) -> None:
        """Reset the connection after the bytes sent so far, so that the client does not take them for the complete
        response; ``done`` is still to be called."""
        self._outbox.flush()
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()

    def close_when_idle(self) -> None:
        """Take no new request; a running one still gets its response."""
        self.closing = True
        self._reader.ready.clear()
        if self.handler is None:
            self._outbox.close(self.transport)

    def check_deadline(self, now: float) -> float:
        """Close the connection of a client that takes too long to send a request, to read its response, or to send the
        next request. Returns the seconds until the next check."""
        limits = self._deadlines.limits
        if self._writing_paused:
            return self._check_unread(now, limits.unread)
        if self.closing:
            return math.inf
        reader = self._reader
        if reader.partial is not None and not reader.refused:
            if self._reading_paused or reader.awaits_continue:  # The client waits for us.
                self._arriving_since = now
            remaining = self._arrival_deadline(reader) - now
            if remaining > 0:
                return remaining
            reader.refuse(SlowRequest(f"The request did not arrive within {now - self._arriving_since:.0f} s."))
            self._serve_ready()
        elif self._busy or reader.ready:
            return limits.idle
        elif now - self._active_at > limits.idle:
            self.close_when_idle()
        else:
            return limits.idle - (now - self._active_at)
        return math.inf

    def _check_unread(self, now: float, limit: float) -> float:
        unread = self.transport.get_write_buffer_size()
        if unread != self._unread:
            self._unread, self._unread_since = unread, now
        elif now - self._unread_since > limit:
            self.transport.abort()
            return math.inf
        return limit / 4

    def _arrival_deadline(self, reader: RequestReader) -> float:
        """The time by which the request that is arriving must be complete."""
        limits = self._deadlines.limits
        if not reader.in_body:
            return self._arriving_since + limits.header
        return self._arriving_since + limits.body + reader.size / BODY_BYTES_PER_SECOND

    # ------------------------------------------------------------------ callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._connections.add(self)
        self._deadlines.watch(self, self._deadlines.limits.idle)

    def data_received(self, data: bytes) -> None:
        if self._on_data is not None:
            self._on_data()
        reader = self._reader
        if reader.refused or self.closing:
            return
        request = reader.parse_known(data)
        if request is None:
            reader.feed(data)
            self._on_parsed(reader)
        elif self._busy or reader.ready:
            reader.ready.append(request)
            self._on_parsed(reader)
        else:
            self._busy = True
            self._serve(self, request)

    def pause_writing(self) -> None:
        self._writing_paused = self._busy = True
        self._unread = -1
        self._deadlines.watch(self, self._deadlines.limits.unread / 4)
        if self.handler is not None:
            self.handler.pause()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self.handler is not None:
            self.handler.resume()
        else:
            self._busy = False
            self._serve_ready()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self._connections.discard(self)
        self._deadlines.drop(self)
        self._reader.close()
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.cancel()

    # ------------------------------------------------------------------ inside

    def _on_parsed(self, reader: RequestReader) -> None:
        """Act on what the reader parsed: serve requests, watch partial ones, and stop reading if too many wait."""
        if reader.partial is not self._arriving:
            self._arriving, self._arriving_since = reader.partial, self._loop.time()
            if reader.partial is not None:
                self._deadlines.watch(self, min(self._deadlines.limits.header, self._deadlines.limits.body))
        if reader.awaits_continue and not reader.refused and not self._busy and not reader.ready:
            reader.awaits_continue = False
            self.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if reader.ready and not self._busy:
            self._serve_ready()
        if len(reader.ready) > _MAX_PIPELINED and not self._reading_paused:
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
            if served % _MAX_PIPELINED == 0:
                self._outbox.flush()  # Only written bytes show that the client does not read.
                continue
            item = ready.popleft()
            if isinstance(item, ServingError):
                self._respond_and_close(item)
                break
            self._busy = True
            self._serve(self, item)
        self._serving = False
        if self._reading_paused and len(ready) <= _MAX_PIPELINED:
            self._reading_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def _respond_and_close(self, error: ServingError) -> None:
        self.closing = True
        self.send(Response.error(error).encode(new_request_id(), close=True))
        self._outbox.flush()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._loop.call_later(_LINGER_SECONDS, self.transport.abort)
