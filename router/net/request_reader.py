"""Parsing of a client connection's bytes into requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

import httptools

from ...common.api.errors import InvalidRequest, ServingError, TooLarge
from .heads import KnownHead, KnownHeads
from .request import Request, new_request_id
from .responses import HeadersTooLarge

_MAX_HEAD_BYTES = 64 * 1024
_MIN_BUFFERED_BODY_BYTES = 256 * 1024
"""Bodies from this size on grow in one buffer: joining 8 MB at their end would block the loop for 5 ms."""


_NOT_FORWARDED: frozenset[bytes] = frozenset((
    b"host", b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"http2-settings", b"expect", b"content-length", b"x-request-id", b"proxy-authorization", b"proxy-authenticate",
))
_KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))  # The latter is Anthropic's.
_PARSED = _NOT_FORWARDED | _KEY_HEADERS | {b"origin"}
_CONNECTION_OPTIONS = frozenset((b"", b"close", b"keep-alive", b"upgrade", b"http2-settings", b"te"))
"""Values of ``Connection`` that name no header, or one that is not forwarded anyway."""


class HeadRules:
    """The headers that are parsed, and those of them that are not forwarded as they came.

    ``id_names`` (lower case) are headers that may carry the request's id; if several do, the first named here counts.
    ``own_traces``: the router writes ``traceparent`` itself, as one more span of the client's trace.
    ``known_heads`` are those that were parsed by these rules before.
    """

    __slots__ = ("parsed", "not_forwarded", "id_names", "known_heads")

    def __init__(self, id_names: Sequence[bytes] = (b"x-request-id",), *, own_traces: bool = False):
        self.id_names = tuple(id_names)
        traces = {b"traceparent"} if own_traces else set()
        self.not_forwarded = _NOT_FORWARDED | traces | _KEY_HEADERS
        self.parsed = _PARSED | traces | set(id_names)
        self.known_heads: KnownHeads[Request] = KnownHeads(self._read_plain)

    def _read_plain(self, head: bytes) -> Request | None:
        """The request that a head announces, if it is plain (see ``KnownHeads``) and has no id."""
        reader = RequestReader(self, 1)
        reader.feed(head)
        request = reader.partial
        if request is None or reader.ready or reader.awaits_continue or request.request_id:
            return None
        reader.feed(b"x")
        plain = (list(reader.ready) == [request] and request.body == b"x" and request.keep_alive
                 and not request.is_http_1_0)
        return request if plain else None


class RequestReader:
    """Puts complete requests into ``ready``, in order; after them an error, if what follows is refused.

    ``parse_known`` is the fast path, for data that is one request with a known head; ``feed`` takes anything.
    """

    __slots__ = ("ready", "refused", "awaits_continue", "partial", "_rules", "_max_payload", "_parser", "_parts",
                 "_large", "size", "_overhead", "_id_rank", "_framing", "_connection", "_api_key", "_api_key_line",
                 "_expects", "in_body", "_last_head")

    def __init__(self, rules: HeadRules, max_payload: int):
        self.ready: deque[Request | ServingError] = deque()
        self.refused = False
        """True once an error was put into ``ready``: nothing is parsed any more."""
        self.awaits_continue = False
        """True while the client waits for ``100 Continue`` before it sends its body."""
        self.partial: Request | None = None
        """The request that has begun to arrive."""
        self._rules = rules
        self._max_payload = max_payload
        self._parser = httptools.HttpRequestParser(self)
        self._parts: list[bytes] = []
        """The parts of the header lines to forward, then those of the body."""
        self._large: bytearray | None = None
        """A large body, as far as it has come."""
        self.size = self._id_rank = 0
        self._overhead = 0
        """Bytes since the last ones of a body: of a head, of chunk headers or of trailers."""
        self._framing = self._connection = self._api_key = self._api_key_line = b""
        self._expects = self.in_body = False
        self._last_head: KnownHead[Request] | None = None

    def parse_known(self, data: bytes) -> Request | None:
        """The request in ``data``, if that is exactly one with a known head; else None, and nothing is consumed."""
        if self.partial is None and (found := self._rules.known_heads.find(data, self._last_head)) is not None:
            known, size, length = found
            if len(data) - size == length <= self._max_payload:
                self._last_head = known
                return known.fact.copy_with(data[size:])
        return None

    def feed(self, data: bytes) -> None:
        """Parse the next bytes."""
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0]:])
            return
        except httptools.HttpParserError as error:
            self.refuse(InvalidRequest(f"The request is not valid HTTP ({error})."))
        if self.partial is not None and self._overhead > _MAX_HEAD_BYTES:
            part = "trailers are" if self.in_body else "head is"
            self.refuse(HeadersTooLarge(f"The request's {part} larger than {_MAX_HEAD_BYTES} bytes."))

    def refuse(self, error: ServingError) -> None:
        """End ``ready`` with ``error``; the data that still arrives is dropped."""
        if not self.refused:
            self.refused = True
            self.ready.append(error)

    def close(self) -> None:
        """Free the parser: nothing is fed any more."""
        self.ready.clear()
        # Parser and reader refer to each other; left to the rare collections, 2 KiB a connection would pile up.
        self._parser = None  # type: ignore[assignment]

    # ------------------------------------------------------------------ callbacks of the parser

    def on_message_begin(self) -> None:
        self.partial = Request()
        self._parts = []
        self._large = None
        self.size = 0
        self.awaits_continue = self._expects = self.in_body = False
        self._framing = self._connection = self._api_key = self._api_key_line = b""

    def on_url(self, url: bytes) -> None:
        self.partial.target += url  # type: ignore[union-attr]  # llhttp begins a message before its URL

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_body:
            return  # A trailer: it may neither join the body nor change what the head has, such as the key.
        request = self.partial
        folded = name.lower()
        if folded in self._rules.parsed:
            self._parse_header(request, name, folded, value)  # type: ignore[arg-type]
            if folded in self._rules.not_forwarded:
                return
        self._parts += (name, b": ", value, b"\r\n")

    def _parse_header(self, request: Request, spelled: bytes, name: bytes, value: bytes) -> None:
        if name == b"transfer-encoding":
            self._framing = b"transfer-encoding: " + value + b"\r\n"
        elif name == b"content-length":
            self._framing = b"content-length: " + value + b"\r\n"
            if value.isdigit() and int(value) > self._max_payload:
                self.refuse(self._too_large())
        elif name == b"authorization":
            request.authorization = value
            request.authorization_line = b"%b: %b\r\n" % (spelled, value)
        elif name == b"x-api-key":
            self._api_key = value
            self._api_key_line = b"%b: %b\r\n" % (spelled, value)
        elif name == b"connection":
            self._connection += b"," + value
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
        assert self.partial is not None
        self._overhead = 0
        self.in_body = True
        self.awaits_continue = self._expects
        if self._connection:
            self._drop_hop_by_hop()
        if self._api_key_line:
            self.partial.authorization = self.partial.authorization or b"Bearer " + self._api_key
            self.partial.authorization_line += self._api_key_line
        self.partial.headers = b"".join(self._parts)
        self._parts = []

    def on_body(self, data: bytes) -> None:
        self.size += len(data)
        self._overhead = 0
        self.awaits_continue = False
        if self.size > self._max_payload:
            self.refuse(self._too_large())
        elif self.refused:
            return
        elif self._large is not None:
            self._large += data
        elif self.size >= _MIN_BUFFERED_BODY_BYTES:
            self._large = bytearray().join((*self._parts, data))
            self._parts = []
        else:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        request, self.partial = self.partial, None
        assert request is not None
        self.awaits_continue = False
        self._overhead = 0
        if self.refused:
            return
        parser, parts = self._parser, self._parts
        request.method = parser.get_method()
        request.keep_alive = parser.should_keep_alive()
        if self._connection or not request.keep_alive:  # The version costs 0.5 us; HTTP/1.0 shows in these.
            request.is_http_1_0 = parser.get_http_version() == "1.0"
        if not request.target.startswith(b"/"):
            request.target = _origin_form(request.target)
        request.path, _, request.query = request.target.partition(b"?")
        if self._large is not None:
            request.body, self._large = cast(bytes, self._large), None
        else:
            request.body = parts[0] if len(parts) == 1 else b"".join(parts)
        if not request.request_id:
            request.request_id = new_request_id()
        self._parts = []
        self.ready.append(request)

    # ------------------------------------------------------------------ inside

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse a request that offers another protocol (Java's client offers HTTP/2 on its first) as HTTP/1.1.

        llhttp stops after such a head and skips the body; a new parser parses the head again without the offer.
        """
        if self.refused:  # Its body is too large: the request is not in ``ready``.
            return
        request = self.ready.pop()
        assert isinstance(request, Request)
        if request.method == b"CONNECT":
            self.refuse(InvalidRequest("This server is no proxy: CONNECT is not supported."))
            return
        self._parser = httptools.HttpRequestParser(self)
        head = (request.method, b" ", request.target, b" HTTP/1.1\r\n", request.headers, request.authorization_line,
                self._framing, b"x-request-id: ", request.request_id, b"\r\n\r\n")
        self.feed(b"".join((*head, rest)))

    def _drop_hop_by_hop(self) -> None:
        """Drop the headers that ``Connection`` names: they are for this hop only."""
        named = {name.strip().lower() for name in self._connection.split(b",")} - _CONNECTION_OPTIONS
        if named:
            lines = range(0, len(self._parts), 4)
            self._parts = [part for start in lines if self._parts[start].lower() not in named
                           for part in self._parts[start:start + 4]]

    def _too_large(self) -> TooLarge:
        return TooLarge("Payload Too Large: the request body is larger than --max-payload-size "
                        f"({self._max_payload} bytes).")


def _origin_form(target: bytes) -> bytes:
    """Turns ``http://host/path``, as clients of a proxy send it, into ``/path``; other targets stay."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    _, slash, path = rest.partition(b"/")
    return slash + path if slash else b"/"
