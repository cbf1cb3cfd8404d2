"""A request as the router holds it."""

from __future__ import annotations

from collections.abc import Callable
from os import urandom

import msgspec

from ..workers.models import Group
from .upstream_answer import AnswerHead


class Request(msgspec.Struct, gc=False, eq=False):
    """One request. ``headers`` are the lines to forward, each ending in CRLF, in the client's spelling.

    A msgspec.Struct, like all that is made anew for each request and written to once or never: making one takes
    a third of the time.
    """

    method: bytes = b""
    target: bytes = b""
    body: bytes = b""
    """A large one is in fact a bytearray that nothing changes any more: what needs a hash of it, or bytes, copies."""
    path: bytes = b""
    query: bytes = b""
    headers: bytes = b""
    authorization: bytes = b""
    authorization_line: bytes = b""
    """The client's header, and its ``x-api-key``, as they came. They are forwarded unless the worker has a key of its
    own, or the router knows the client's."""
    origin: bytes = b""
    traceparent: bytes = b""
    request_id: bytes = b""
    reply_headers: bytes = b""
    """Lines that the answer carries whoever gives it."""
    keep_alive: bool = True
    on_head: Callable[[AnswerHead], AnswerHead] | None = None
    """Reads, and may change, the head of the answer that is relayed."""
    old: bool = False
    """HTTP/1.0: the client does not know chunked answers."""
    group: Group = None
    """Whose workers may serve it: those of its model."""

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
        made: Request = self.__copy__()  # type: ignore[attr-defined]  # every Struct has it, the stubs do not
        made.body = body
        made.request_id = new_id()
        return made


_ids: list[bytes] = []


def new_id() -> bytes:
    """An id for a request that brought none: 32 hexadecimal digits."""
    if not _ids:
        many = urandom(16 * 64).hex().encode()  # One at a time they would cost a system call each.
        _ids.extend([many[start:start + 32] for start in range(0, len(many), 32)])
    return _ids.pop()
