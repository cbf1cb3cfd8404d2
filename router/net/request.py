"""A client's request, parsed as far as routing needs."""

from __future__ import annotations

from collections.abc import Callable
from os import urandom

import msgspec

from .upstream_response import ResponseHead

Group = str | None
"""The workers that serve one model, by its name, and those whose models are unknown; "": only the latter. None: all
workers."""


class Request(msgspec.Struct, gc=False, eq=False):
    """One request. ``headers`` are the lines to forward, each ending in CRLF, in the client's spelling.

    A msgspec.Struct, like everything that is created for each request and written to once or never: creating one takes
    a third of the time.
    """

    method: bytes = b""
    target: bytes = b""
    body: bytes = b""
    """The body. A large one is in fact a bytearray that is not changed any more: code that needs its hash copies it."""
    path: bytes = b""
    query: bytes = b""
    headers: bytes = b""
    authorization: bytes = b""
    authorization_line: bytes = b""
    """The client's Authorization and ``x-api-key`` lines as they came. They are forwarded unless the worker has its own
    key, or the router knows the client's."""
    origin: bytes = b""
    traceparent: bytes = b""
    request_id: bytes = b""
    reply_headers: bytes = b""
    """Header lines that are added to any response."""
    keep_alive: bool = True
    on_head: Callable[[ResponseHead], ResponseHead] | None = None
    """Reads, and may replace, the head of the response that is relayed."""
    is_http_1_0: bool = False
    """True for HTTP/1.0: the client does not know chunked responses."""
    group: Group = None
    """The model group whose workers may serve it."""

    @property
    def head_only(self) -> bool:
        return self.method == b"HEAD"

    def header(self, name: bytes) -> bytes:
        """The value of the first forwarded header called ``name`` (lower case); b"" if there is none."""
        lines = b"\r\n" + self.headers
        start = lines.lower().find(b"\r\n" + name + b":")
        if start < 0:
            return b""
        start += len(name) + 3
        return lines[start:lines.index(b"\r\n", start)].strip()

    def copy_with(self, body: bytes) -> Request:
        """A new request with the head of this one, which has no id."""
        copy: Request = self.__copy__()  # type: ignore[attr-defined]  # every Struct has it, the stubs do not
        copy.body = body
        copy.request_id = new_request_id()
        return copy


_ids: list[bytes] = []


def new_request_id() -> bytes:
    """An id for a request that has none: 32 hexadecimal digits."""
    if not _ids:
        digits = urandom(16 * 64).hex().encode()  # 64 ids at once: one at a time would cost a system call each.
        _ids.extend([digits[start:start + 32] for start in range(0, len(digits), 32)])
    return _ids.pop()
