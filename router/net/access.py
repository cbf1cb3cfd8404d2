"""Authorization: API keys of clients and administrators, and pages of other origins (CORS)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256

from ...common.api.errors import NotFound, Unauthorized
from .request import Request
from .responses import Response


class ApiKeys:
    """The API keys, compared by their digests, so that the time of a comparison says nothing about a near miss.

    An admin key authorizes everything. Client keys never authorize changes of workers: a client that may add one would
    be sent the prompts of all others. Without client keys everyone is a client.
    """

    def __init__(self, clients: Iterable[str], admins: Iterable[str]):
        admin_digests = frozenset(map(_digest, admins))
        client_digests = frozenset(map(_digest, clients))
        self._all = client_digests | admin_digests
        self._admins = admin_digests
        self._has_clients = bool(client_digests)

    def __bool__(self) -> bool:
        return bool(self._all)

    def check(self, request: Request, *, admin: bool) -> None:
        """Raises Unauthorized if the request's key does not authorize it. A key that the router knows is removed, as
        workers get their own."""
        scheme, _, key = request.authorization.partition(b" ")
        digest = sha256(key.strip()).digest() if scheme.lower() == b"bearer" else b""
        if digest in self._all:
            request.authorization_line = b""
            if digest in self._admins or not admin:
                return
        elif not admin and not self._has_clients:
            return
        if not admin:
            raise Unauthorized("This needs the router's API key: 'Authorization: Bearer KEY'.")
        if self._admins:
            raise Unauthorized("This needs the router's admin key: 'Authorization: Bearer KEY'.")
        raise Unauthorized("This changes workers, which clients' keys do not open: start the router with "
                           "--admin-api-key KEY, and send that one.")


def _digest(key: str) -> bytes:
    return sha256(key.encode()).digest()


_GRANTS = re.compile(rb"\r\naccess-control-[^\r\n]*", re.IGNORECASE)


class Cors:
    """CORS headers for pages of allowed origins. The router alone decides: those of workers are removed."""

    def __init__(self, origins: Iterable[str]):
        self._origins = frozenset(origin.rstrip("/").encode() for origin in origins)

    def grant(self, origin: bytes) -> bytes:
        """Header lines of the response to a request from ``origin`` (empty: from no page)."""
        if not origin or not (b"*" in self._origins or origin in self._origins):
            return b"vary: Origin\r\n"
        return (b"vary: Origin\r\naccess-control-allow-origin: %b\r\n"
                b"access-control-expose-headers: x-request-id\r\n" % origin)

    def preflight(self, request: Request) -> Response:
        """The response to a browser's preflight request; raises NotFound for origins that are not allowed."""
        if b"access-control-allow-origin" not in request.reply_headers:
            raise NotFound("This origin is not among --cors-allowed-origins.")
        names = request.header(b"access-control-request-headers")
        return Response(204, headers=(
            ("access-control-allow-methods", "GET, POST, PUT, PATCH, DELETE"), ("access-control-max-age", "600"),
            *((("access-control-allow-headers", names.decode("latin-1")),) if names else ())))


def without_grants(head: bytes) -> bytes:
    """A response's head without the worker's CORS headers."""
    return _GRANTS.sub(b"", head)
