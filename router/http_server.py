"""The client's side: HTTP/1.1 on a raw protocol.

A connection parses requests and hands complete ones, one at a time, to ``serve``. Whoever serves a
request becomes the connection's ``handler`` until it calls ``done``: it is told when the client
leaves (``cancel``) and when it reads too slowly (``pause``, ``resume``).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from random import getrandbits
from typing import Protocol

import httptools

from ..common.api.errors import InvalidRequest, ServingError, TooLarge
from .answer import AnswerHead
from .wire import HeadersTooLarge, Response, SlowRequest

_MAX_HEAD = 64 * 1024
_MAX_WAITING = 32
"""Pipelined requests that wait on one connection before it is read no further."""
_LINGER_SECONDS = 2.0
"""How long a refused upload is still swallowed: closing at once resets the connection, and the client
loses the answer that says why."""

_NOT_FORWARDED: frozenset[bytes] = frozenset((
    b"host", b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"http2-settings", b"expect", b"content-length", b"x-request-id",
))
_READ = _NOT_FORWARDED | {b"authorization", b"origin"}


class HeadRules:
    """Which headers are read from requests, and which of those are not forwarded as they came.

    ``id_names`` (lower case) may carry the request's id; of several the first named here counts.
    ``own_traces``: the router writes ``traceparent`` itself, as one more span of the client's trace.
    """

    __slots__ = ("read", "kept_back", "id_names")

    def __init__(self, id_names: Sequence[bytes] = (b"x-request-id",), *, own_traces: bool = False):
        self.id_names = tuple(id_names)
        traces = {b"traceparent"} if own_traces else set()
        self.kept_back = _NOT_FORWARDED | traces | {b"authorization"}
        self.read = _READ | traces | set(id_names)


class Request:
    """One request. ``headers`` are the lines to forward, each ending in CRLF, in the client's spelling."""

    __slots__ = ("method", "target", "path", "query", "headers", "authorization", "authorization_line", "origin",
                 "traceparent", "request_id", "reply_headers", "body", "on_head", "keep_alive", "old")

    method: bytes
    body: bytes

    def __init__(self) -> None:
        self.target = b""
        self.path = b""
        self.query = b""
        self.headers: list[bytes] = []
        self.authorization = b""
        self.authorization_line = b""
        """The client's header as it came: it is forwarded unless the worker has a key of its own."""
        self.origin = b""
        self.traceparent = b""
        self.request_id = b""
        self.reply_headers = b""
        """Lines that the answer carries whoever gives it."""
        self.keep_alive = True
        self.on_head: Callable[[AnswerHead], AnswerHead] | None = None
        """Reads, and may change, the head of the answer that is relayed."""
        self.old = False
        """HTTP/1.0: the client does not know chunked answers."""

    @property
    def head_only(self) -> bool:
        return self.method == b"HEAD"


class Handler(Protocol):
    """Serves one request."""

    def cancel(self) -> None:
        """The client left; nothing may be written any more."""

    def pause(self) -> None:
        """The client reads too slowly: produce no more until ``resume``."""

    def resume(self) -> None: ...


Serve = Callable[["ClientConnection", Request], None]


class ClientConnection(asyncio.Protocol):
    """One client connection; its requests are served one after another."""

    __slots__ = ("_serve", "_rules", "_id_rank", "_max_payload", "_open", "_loop", "_parser", "_request", "_chunks",
                 "_size", "_head_size", "_expects", "_framing", "_names_connection", "_ready", "_serving", "_busy",
                 "_refused", "_reading_paused", "transport", "handler", "closing", "heard_at", "idle_sweeps")

    transport: asyncio.Transport

    def __init__(self, serve: Serve, *, max_payload: int, connections: set[ClientConnection],
                 loop: asyncio.AbstractEventLoop, rules: HeadRules):
        self._serve = serve
        self._rules = rules
        self._id_rank = 0
        self._max_payload = max_payload
        self._open = connections
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._request: Request | None = None
        self._chunks: list[bytes] = []
        self._size = self._head_size = 0
        self._expects = self._names_connection = False
        self._framing = b""
        self._ready: deque[Request | ServingError] = deque()
        self._serving = self._busy = self._refused = self._reading_paused = False
        self.handler: Handler | None = None
        self.closing = False
        self.heard_at = 0.0
        self.idle_sweeps = 0
        """Sweeps in a row that met no request: cheaper than a time noted with each."""

    # ------------------------------------------------------------------ what a handler uses

    def respond(self, request: Request, response: Response) -> None:
        """Write a complete answer; ``done`` is still to be called."""
        self.transport.write(response.encode(request.request_id, head_only=request.head_only,
                                             close=not request.keep_alive or self.closing,
                                             more=request.reply_headers))

    def done(self, *, keep_alive: bool) -> None:
        """The handler finished its answer: serve the next request, or close after the bytes are out."""
        self.handler = None
        self._busy = False
        if not keep_alive or self.closing:
            self.closing = True
            self.transport.close()
        elif self._ready:
            self._serve_ready()

    def close_when_idle(self) -> None:
        """Take no new request; a running one still gets its answer."""
        self.closing = True
        self._ready.clear()
        if not self._busy:
            self.transport.close()

    def sweep(self, now: float, silence_limit: float) -> None:
        """Give up on a client that stopped for ``silence_limit`` seconds in the middle of a request."""
        if self._request is None:
            if not self._busy:
                self.idle_sweeps += 1
        elif silence_limit and not self._refused and not self.closing and now - self.heard_at > silence_limit:
            self._refuse(SlowRequest(f"The request did not arrive completely within {silence_limit:g} s."))
            self._serve_ready()

    # ------------------------------------------------------------------ callbacks of the parser

    def on_message_begin(self) -> None:
        self._request = Request()
        self._chunks = []
        self._size = 0
        self._expects = self._names_connection = False
        self._framing = b""

    def on_url(self, url: bytes) -> None:
        self._request.target += url  # type: ignore[union-attr]  # llhttp begins a message before its URL

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._request
        folded = name.lower()
        if folded in self._rules.read:
            self._read_header(request, name, folded, value)  # type: ignore[arg-type]
            if folded in self._rules.kept_back:
                return
        request.headers += (name, b": ", value, b"\r\n")  # type: ignore

    def _read_header(self, request: Request, spelled: bytes, name: bytes, value: bytes) -> None:
        if name == b"transfer-encoding":
            self._framing = b"transfer-encoding: " + value + b"\r\n"
        elif name == b"content-length":
            self._framing = b"content-length: " + value + b"\r\n"
            if value.isdigit() and int(value) > self._max_payload:
                self._refuse(self._too_large())
        elif name == b"authorization":
            request.authorization = value
            request.authorization_line = b"%b: %b\r\n" % (spelled, value)
        elif name == b"connection":
            self._names_connection = True
        elif name == b"expect":
            self._expects = value.lower() == b"100-continue"
        elif name == b"origin":
            request.origin = value
        elif name == b"traceparent":
            request.traceparent = value
        elif name in self._rules.id_names:
            rank = self._rules.id_names.index(name)
            if not request.request_id or rank < self._id_rank:
                request.request_id, self._id_rank = value, rank

    def on_headers_complete(self) -> None:
        self._head_size = 0
        if self._expects and not self._refused and not self._busy and not self._ready:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._max_payload:
            self._refuse(self._too_large())
        elif not self._refused:
            self._chunks.append(data)

    def on_message_complete(self) -> None:
        request = self._request
        assert request is not None
        self._request = None
        if self._refused:
            return
        parser, chunks = self._parser, self._chunks
        request.method = parser.get_method()
        request.keep_alive = parser.should_keep_alive()
        if self._names_connection or not request.keep_alive:  # The version costs 0.5 us; HTTP/1.0 shows in these.
            request.old = parser.get_http_version() == "1.0"
        if not request.target.startswith(b"/"):
            request.target = _origin_form(request.target)
        request.path, _, request.query = request.target.partition(b"?")
        request.body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if not request.request_id:
            request.request_id = b"%032x" % getrandbits(128)
        self._chunks = []
        self._ready.append(request)

    # ------------------------------------------------------------------ callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self._open.add(self)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.closing:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0]:])
            return
        except httptools.HttpParserError as error:
            self._refuse(InvalidRequest(f"The request is not valid HTTP ({error})."))
        if self._request is not None:
            self._note_incomplete(len(data))
        if self._ready and not self._busy:
            self._serve_ready()
        if len(self._ready) > _MAX_WAITING and not self._reading_paused:
            self._reading_paused = True
            self.transport.pause_reading()

    def pause_writing(self) -> None:
        if self.handler is not None:
            self.handler.pause()

    def resume_writing(self) -> None:
        if self.handler is not None:
            self.handler.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closing = True
        self._open.discard(self)
        self._ready.clear()
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.cancel()
        # Parser and connection hold each other; left to the rare collections, 2 KiB a connection would pile up.
        self._parser = None  # type: ignore[assignment]

    # ------------------------------------------------------------------ inside

    def _note_incomplete(self, size: int) -> None:
        self.heard_at = self._loop.time()
        if not self._chunks and not self._size:
            self._head_size += size
            if self._head_size > _MAX_HEAD and not self._refused:
                self._refuse(HeadersTooLarge(f"The request's head is larger than {_MAX_HEAD} bytes."))

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Serve a request that offers another protocol (Java's client offers HTTP/2 on its first) as HTTP/1.1.

        llhttp stops behind such a head and skips the body; a new parser reads the head again without the offer.
        """
        request = self._ready.pop()
        assert isinstance(request, Request)
        if request.method == b"CONNECT":
            self._refuse(InvalidRequest("This server is no proxy: CONNECT is not supported."))
            self._serve_ready()
            return
        self._parser = httptools.HttpRequestParser(self)
        head = (request.method, b" ", request.target, b" HTTP/1.1\r\n", *request.headers, self._framing,
                b"x-request-id: ", request.request_id, b"\r\n\r\n")
        self.data_received(b"".join((*head, rest)))

    def _serve_ready(self) -> None:
        if self._serving:  # Called by done() within serve(): the loop below takes the next one.
            return
        self._serving = True
        while self._ready and not self._busy and not self.transport.is_closing():
            item = self._ready.popleft()
            if isinstance(item, ServingError):
                self._answer_refusal(item)
                break
            self._busy = True
            self.idle_sweeps = 0
            self._serve(self, item)
        self._serving = False
        if self._reading_paused and len(self._ready) <= _MAX_WAITING:
            self._reading_paused = False
            if not self.transport.is_closing():
                self.transport.resume_reading()

    def _refuse(self, error: ServingError) -> None:
        """Answer with an error once earlier requests are served, then close; what still arrives is dropped."""
        if not self._refused:
            self._refused = True
            self._ready.append(error)

    def _answer_refusal(self, error: ServingError) -> None:
        self.closing = True
        self.transport.write(Response.error(error).encode(b"%032x" % getrandbits(128), close=True))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._loop.call_later(_LINGER_SECONDS, self.transport.abort)

    def _too_large(self) -> TooLarge:
        return TooLarge(f"The request body is larger than --max-payload-size ({self._max_payload} bytes).")


def _origin_form(target: bytes) -> bytes:
    """``http://host/path`` (what clients of a proxy send) -> ``/path``; other targets stay."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    _, slash, path = rest.partition(b"/")
    return slash + path if slash else b"/"
