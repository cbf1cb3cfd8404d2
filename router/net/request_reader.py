"""The bytes of a client's connection, read as requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

import httptools

from ...common.api.errors import InvalidRequest, ServingError, TooLarge
from .heads import KnownHead, KnownHeads
from .request import Request, new_id
from .responses import HeadersTooLarge

_MAX_HEAD = 64 * 1024
_GATHERED = 256 * 1024
"""Bodies from this size on grow in one buffer: joining 8 MB at their end would take 5 ms of the loop at once."""


_NOT_FORWARDED: frozenset[bytes] = frozenset((
    b"host", b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
    b"http2-settings", b"expect", b"content-length", b"x-request-id", b"proxy-authorization", b"proxy-authenticate",
))
_KEYS = frozenset((b"authorization", b"x-api-key"))  # Anthropic's clients show theirs in a header of their own
_READ = _NOT_FORWARDED | _KEYS | {b"origin"}
_OF_CONNECTION = frozenset((b"", b"close", b"keep-alive", b"upgrade", b"http2-settings", b"te"))
"""What ``Connection`` names beside headers that are for this connection alone."""


class HeadRules:
    """Which headers are read from requests, and which of those are not forwarded as they came.

    ``id_names`` (lower case) may carry the request's id; of several the first named here counts.
    ``own_traces``: the router writes ``traceparent`` itself, as one more span of the client's trace.
    ``known`` are heads that were read by these rules before.
    """

    __slots__ = ("read", "kept_back", "id_names", "known")

    def __init__(self, id_names: Sequence[bytes] = (b"x-request-id",), *, own_traces: bool = False):
        self.id_names = tuple(id_names)
        traces = {b"traceparent"} if own_traces else set()
        self.kept_back = _NOT_FORWARDED | traces | _KEYS
        self.read = _READ | traces | set(id_names)
        self.known: KnownHeads[Request] = KnownHeads(self._plain)

    def _plain(self, head: bytes) -> Request | None:
        """What a head announces, if it is plain (see ``KnownHeads``) and names no id."""
        reader = RequestReader(self, 1)
        reader.feed(head)
        request = reader.partial
        if request is None or reader.ready or reader.awaits_continue or request.request_id:
            return None
        reader.feed(b"x")
        plain = list(reader.ready) == [request] and request.body == b"x" and request.keep_alive and not request.old
        return request if plain else None


class RequestReader:
    """Puts complete requests into ``ready``, in order; after them an error, when what follows is refused.

    ``whole`` is the short way, for data that is one request with a known head; ``feed`` takes in anything.
    """

    __slots__ = ("ready", "refused", "awaits_continue", "partial", "_rules", "_max_payload", "_parser", "_pieces",
                 "_large", "size", "_beside", "_id_rank", "_framing", "_connection", "_api_key", "_api_key_line",
                 "_expects", "in_body", "_last")

    def __init__(self, rules: HeadRules, max_payload: int):
        self.ready: deque[Request | ServingError] = deque()
        self.refused = False
        """Whether an error was put into ``ready``: nothing is read any more."""
        self.awaits_continue = False
        """Whether the client waits for a word before it sends its body."""
        self.partial: Request | None = None
        """The request that has begun to arrive."""
        self._rules = rules
        self._max_payload = max_payload
        self._parser = httptools.HttpRequestParser(self)
        self._pieces: list[bytes] = []
        """Of the lines to forward, then of the body."""
        self._large: bytearray | None = None
        """A large body, as far as it has come."""
        self.size = self._id_rank = 0
        self._beside = 0
        """Bytes since the last ones of a body: of a head, or of what stands between chunks and behind them."""
        self._framing = self._connection = self._api_key = self._api_key_line = b""
        self._expects = self.in_body = False
        self._last: KnownHead[Request] | None = None

    def whole(self, data: bytes) -> Request | None:
        """The request that ``data`` is, where it is exactly one with a known head; else nothing is taken in."""
        if self.partial is None and (found := self._rules.known.find(data, self._last)) is not None:
            known, size, length = found
            if len(data) - size == length <= self._max_payload:
                self._last = known
                return known.fact.repeated(data[size:])
        return None

    def feed(self, data: bytes) -> None:
        """Take in the next bytes."""
        self._beside += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0]:])
            return
        except httptools.HttpParserError as error:
            self.refuse(InvalidRequest(f"The request is not valid HTTP ({error})."))
        if self.partial is not None and self._beside > _MAX_HEAD:
            part = "trailers are" if self.in_body else "head is"
            self.refuse(HeadersTooLarge(f"The request's {part} larger than {_MAX_HEAD} bytes."))

    def refuse(self, error: ServingError) -> None:
        """Let ``error`` be the last that is ready; what still arrives is dropped."""
        if not self.refused:
            self.refused = True
            self.ready.append(error)

    def close(self) -> None:
        """Nothing is fed any more."""
        self.ready.clear()
        # Parser and reader hold each other; left to the rare collections, 2 KiB a connection would pile up.
        self._parser = None  # type: ignore[assignment]

    # ------------------------------------------------------------------ callbacks of the parser

    def on_message_begin(self) -> None:
        self.partial = Request()
        self._pieces = []
        self._large = None
        self.size = 0
        self.awaits_continue = self._expects = self.in_body = False
        self._framing = self._connection = self._api_key = self._api_key_line = b""

    def on_url(self, url: bytes) -> None:
        self.partial.target += url  # type: ignore[union-attr]  # llhttp begins a message before its URL

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_body:
            return  # A trailer: it may neither join the body nor change what the head said, such as the key.
        request = self.partial
        folded = name.lower()
        if folded in self._rules.read:
            self._read_header(request, name, folded, value)  # type: ignore[arg-type]
            if folded in self._rules.kept_back:
                return
        self._pieces += (name, b": ", value, b"\r\n")

    def _read_header(self, request: Request, spelled: bytes, name: bytes, value: bytes) -> None:
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
        self._beside = 0
        self.in_body = True
        self.awaits_continue = self._expects
        if self._connection:
            self._drop_named()
        if self._api_key_line:
            self.partial.authorization = self.partial.authorization or b"Bearer " + self._api_key
            self.partial.authorization_line += self._api_key_line
        self.partial.headers = b"".join(self._pieces)
        self._pieces = []

    def on_body(self, data: bytes) -> None:
        self.size += len(data)
        self._beside = 0
        self.awaits_continue = False
        if self.size > self._max_payload:
            self.refuse(self._too_large())
        elif self.refused:
            return
        elif self._large is not None:
            self._large += data
        elif self.size >= _GATHERED:
            self._large = bytearray().join((*self._pieces, data))
            self._pieces = []
        else:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        request, self.partial = self.partial, None
        assert request is not None
        self.awaits_continue = False
        self._beside = 0
        if self.refused:
            return
        parser, pieces = self._parser, self._pieces
        request.method = parser.get_method()
        request.keep_alive = parser.should_keep_alive()
        if self._connection or not request.keep_alive:  # The version costs 0.5 us; HTTP/1.0 shows in these.
            request.old = parser.get_http_version() == "1.0"
        if not request.target.startswith(b"/"):
            request.target = _origin_form(request.target)
        request.path, _, request.query = request.target.partition(b"?")
        if self._large is not None:
            request.body, self._large = cast(bytes, self._large), None
        else:
            request.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if not request.request_id:
            request.request_id = new_id()
        self._pieces = []
        self.ready.append(request)

    # ------------------------------------------------------------------ inside

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read a request that offers another protocol (Java's client offers HTTP/2 on its first) as HTTP/1.1.

        llhttp stops behind such a head and skips the body; a new parser reads the head again without the offer.
        """
        if self.refused:  # its body is too large: nothing of it is ready
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

    def _drop_named(self) -> None:
        """Forward no header that ``Connection`` names: it is for us."""
        named = {name.strip().lower() for name in self._connection.split(b",")} - _OF_CONNECTION
        if named:
            lines = range(0, len(self._pieces), 4)
            self._pieces = [piece for at in lines if self._pieces[at].lower() not in named
                            for piece in self._pieces[at:at + 4]]

    def _too_large(self) -> TooLarge:
        return TooLarge("Payload Too Large: the request body is larger than --max-payload-size "
                        f"({self._max_payload} bytes).")


def _origin_form(target: bytes) -> bytes:
    """``http://host/path`` (what clients of a proxy send) -> ``/path``; other targets stay."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    _, slash, path = rest.partition(b"/")
    return slash + path if slash else b"/"
