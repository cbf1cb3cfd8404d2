"""A request as the router holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import urandom

from .answer import AnswerHead


class Request:
    """One request. ``headers`` are the lines to forward, each ending in CRLF, in the client's spelling."""

    __slots__ = ("method", "target", "path", "query", "headers", "authorization", "authorization_line", "origin",
                 "traceparent", "request_id", "reply_headers", "body", "on_head", "keep_alive", "old")

    def __init__(self, method: bytes = b"", target: bytes = b"", body: bytes = b"") -> None:
        self.method = method
        self.target = target
        self.path = b""
        self.query = b""
        self.headers = b""
        self.authorization = b""
        self.authorization_line = b""
        """The client's header as it came: it is forwarded unless the worker has a key of its own."""
        self.origin = b""
        self.traceparent = b""
        self.request_id = b""
        self.body = body
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

    def header(self, name: bytes) -> bytes:
        """The value of the first forwarded header called ``name`` (lower case); b"" where there is none."""
        lines = b"\r\n" + self.headers
        start = lines.lower().find(b"\r\n" + name + b":")
        if start < 0:
            return b""
        start += len(name) + 3
        return lines[start:lines.index(b"\r\n", start)].strip()

    def repeated(self, body: bytes) -> Request:
        """A new request with the head of this one, which names no id."""
        made = Request.__new__(Request)
        made.method = self.method
        made.target = self.target
        made.path = self.path
        made.query = self.query
        made.headers = self.headers
        made.authorization = self.authorization
        made.authorization_line = self.authorization_line
        made.origin = self.origin
        made.traceparent = self.traceparent
        made.request_id = new_id()
        made.body = body
        made.reply_headers = b""
        made.keep_alive = self.keep_alive
        made.on_head = None
        made.old = self.old
        return made


def _ids() -> Iterator[bytes]:
    while True:
        many = urandom(16 * 64).hex().encode()  # One at a time they would cost a system call each.
        for start in range(0, len(many), 32):
            yield many[start:start + 32]


new_id: Callable[[], bytes] = _ids().__next__
"""An id for a request that brought none: 32 hexadecimal digits."""
