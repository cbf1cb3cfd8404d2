"""Bootstrap server, from which decode ranks learn how to reach the ranks of a prefill server.

It runs in a prefill server's API server process. The ranks register themselves when they are up; the last registration
of a rank counts, so a restarted engine replaces its predecessor.

With ``--cluster-secret`` a client first asks for the server's random session, and signs each request over it, a nonce
of its own, method, path and body; a nonce counts once. The response is signed over the same nonce, so neither an old
request nor an old response can be replayed.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import logging
import secrets
import socket
import threading
import time
import urllib.parse
from collections.abc import Awaitable, Callable
from types import TracebackType

import msgspec
from aiohttp import web

from ..common.api.errors import ConfigError, InvalidRequest, NotFound, ServingError, Unauthorized
from ..common.api.unreadable import UNREADABLE
from ..common.config.addresses import cannot_listen
from .protocol.authentication import SECRET_MISMATCH, Secret, make_secret
from .protocol.messages import RankInfo

logger = logging.getLogger("baton.kvtransfer")

MAX_BODY_BYTES = 1024 * 1024  # a RankInfo is a few hundred bytes

_NONCE_HEADER, _MAC_HEADER = "Baton-Nonce", "Baton-Seal"


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SecretMismatch(Exception):
    """Raised where the bootstrap server does not share our ``--cluster-secret``."""


class NotRegistered(Exception):
    """Raised where the bootstrap server is up, but not all of its ranks have registered (yet)."""


class BootstrapServer:
    """``async with BootstrapServer(host, port):`` serves until the block is left.

    ``PUT /register`` takes a RankInfo (JSON), ``GET /ranks`` answers all of them once they are complete, ``GET
    /session`` answers the session to sign for, ``GET /health`` answers 200. ``port`` 0 takes a free one; ``.port`` is
    the one in use. ``secret`` is ``--cluster-secret``. Entering raises ConfigError when the port is occupied.
    """

    def __init__(self, host: str, port: int, secret: str | None = None):
        self.host = host
        self.port = port
        self.ranks: dict[tuple[int, int, int], RankInfo] = {}  # by DP, PP and TP rank
        self._secret = make_secret(secret)
        self._session = secrets.token_hex(16)
        self._nonces: set[str] = set()
        self._refused: set[str | None] = set()
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._check])
        app.add_routes([web.put("/register", self._handle_register), web.get("/ranks", self._handle_ranks),
                        web.get("/session", self._handle_session), web.get("/health", self._handle_health)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)

    async def __aenter__(self) -> BootstrapServer:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise cannot_listen(self.host, self.port, error, port_flag="--disaggregation-bootstrap-port") from None
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        traceback: TracebackType | None) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _check(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._secret is None or request.path in ("/session", "/health"):
            if self._secret is None and _MAC_HEADER in request.headers:
                self._warn_refused(request)
            return await handler(request)
        nonce, mac = request.headers.get(_NONCE_HEADER, ""), request.headers.get(_MAC_HEADER, "")
        parts = _request_parts(self._session, nonce, request.method, request.path_qs, await request.read())
        if nonce in self._nonces or not self._secret.verifies(_decode_hex(mac), *parts):
            self._warn_refused(request)
            return _error_response(Unauthorized("The request is not signed with this server's --cluster-secret.",
                                                code="wrong_cluster_secret"))
        self._nonces.add(nonce)  # 80 bytes for each connection of a decode rank
        response = await handler(request)
        assert isinstance(response, web.Response) and isinstance(response.body, bytes)
        response.headers[_MAC_HEADER] = self._secret.mac(*_response_parts(nonce, response.status, response.body)).hex()
        return response

    def _warn_refused(self, request: web.Request) -> None:
        """Warns once for each host, which asks again for every request."""
        if request.remote not in self._refused:
            self._refused.add(request.remote)
            logger.warning("A server at %s is refused: %s.", request.remote, SECRET_MISMATCH)

    async def _handle_session(self, request: web.Request) -> web.Response:
        return web.json_response({"session": self._session})

    async def _handle_register(self, request: web.Request) -> web.Response:
        try:
            info = msgspec.json.decode(await request.read(), type=RankInfo)
        except UNREADABLE as error:
            return _error_response(InvalidRequest(f"The body is no rank description: {error}."))
        self.ranks[info.dp_rank, info.pp_rank, info.rank] = info
        return web.json_response({})

    async def _handle_ranks(self, request: web.Request) -> web.Response:
        first = self.ranks.get((0, 0, 0))
        sizes = (first.dp_size, first.pp_size, first.tp_size) if first is not None else (1, 1, 1)
        dp_ranks, pp_ranks, tp_ranks = map(range, sizes)
        ranks = [self.ranks.get(rank) for rank in itertools.product(dp_ranks, pp_ranks, tp_ranks)]
        if None in ranks:
            return _error_response(NotFound(f"{len(self.ranks)} of the {len(ranks)} ranks of this prefill server have "
                                            "registered."))
        return web.Response(body=msgspec.json.encode(ranks), content_type="application/json")

    async def _handle_health(self, request: web.Request) -> web.Response:
        return web.json_response({})


def _error_response(error: ServingError) -> web.Response:
    return web.json_response(error.to_openai(), status=error.status)


def register_rank(url: str, info: RankInfo, deadline: float = 30.0, secret: str | None = None) -> None:
    """Registers at the bootstrap server at ``url``, trying for ``deadline`` seconds; then raises ConfigError."""
    parts = urllib.parse.urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    end = time.monotonic() + deadline
    while True:
        try:
            status, body = _request(address, "PUT", "/register", msgspec.json.encode(info), 5.0, make_secret(secret))
            if status == 200:
                return
            reason = f"it answered {status}: {body[:200].decode(errors='replace')}"
        except OSError as error:
            reason = str(error)
        except SecretMismatch:
            raise ConfigError(f"The bootstrap server {url} refuses rank {info.rank}: {SECRET_MISMATCH}.") from None
        if time.monotonic() >= end:
            raise ConfigError(f"Rank {info.rank} could not register at the bootstrap server {url}: {reason}.")
        time.sleep(0.1)


def fetch_ranks(address: tuple[str, int], timeout: float, secret: Secret | None = None) -> list[RankInfo]:
    """Fetches all ranks in order of DP, PP and TP rank; blocking. Raises NotRegistered, SecretMismatch, or OSError
    where no bootstrap server answers."""
    status, body = _request(address, "GET", "/ranks", None, timeout, secret)
    if status == 404:
        raise NotRegistered("not all of its ranks have registered there")
    if status != 200:
        raise OSError(f"it answered {status}")
    try:
        ranks = msgspec.json.decode(body, type=list[RankInfo])
    except UNREADABLE as error:
        raise OSError(f"it answered something else than its ranks ({error})") from None
    if not ranks:
        raise OSError("it answered no ranks")
    return ranks


def _request(address: tuple[str, int], method: str, path: str, body: bytes | None, timeout: float,
             secret: Secret | None) -> tuple[int, bytes]:
    """Returns status and body of an authenticated request. Raises OSError, and SecretMismatch where an authentication
    code is wrong."""
    nonce, headers = secrets.token_hex(16), {}
    if secret is not None:
        status, response, _ = _send_request(address, "GET", "/session", None, timeout, {})
        session = _parse_session(response) if status == 200 else ""
        parts = _request_parts(session, nonce, method, path, body or b"")
        headers = {_NONCE_HEADER: nonce, _MAC_HEADER: secret.mac(*parts).hex()}
    status, response, mac = _send_request(address, method, path, body, timeout, headers)
    if status == 401:
        raise SecretMismatch
    if secret is not None and not secret.verifies(_decode_hex(mac), *_response_parts(nonce, status, response)):
        raise SecretMismatch
    return status, response


def _send_request(address: tuple[str, int], method: str, path: str, body: bytes | None, timeout: float,
                  headers: dict[str, str]) -> tuple[int, bytes, str]:
    try:
        connection = http.client.HTTPConnection(*address, timeout=timeout)
    except http.client.InvalidURL as error:
        raise OSError(f"{address[0]!r} is no host name ({error})") from None
    try:
        connection.connect()
        with _Deadline(connection.sock, timeout):
            connection.request(method, path, body, headers | ({"Content-Type": "application/json"} if body else {}))
            response = connection.getresponse()
            return response.status, response.read(MAX_BODY_BYTES), response.headers.get(_MAC_HEADER, "")
    except http.client.HTTPException as error:
        raise OSError(f"it speaks no HTTP ({error})") from None
    except UnicodeError as error:  # raised by the resolver
        raise OSError(f"{address[0]!r} is no host name ({error})") from None
    finally:
        connection.close()


class _Deadline:
    """Time limit of a whole exchange; a socket's own timeout starts again with each byte. Past the limit the connection
    is shut down, and leaving the block raises TimeoutError."""

    def __init__(self, sock: socket.socket, seconds: float):
        self._sock = sock
        self._seconds = seconds
        self._expired = False
        self._timer = threading.Timer(seconds, self._shut_down)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._expired:
            raise TimeoutError(f"it did not answer within {self._seconds:g} s") from None

    def _shut_down(self) -> None:
        self._expired = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _parse_session(response: bytes) -> str:
    try:
        return msgspec.json.decode(response, type=dict[str, str]).get("session", "")
    except UNREADABLE:
        raise OSError("it answered something else than its session") from None


def _request_parts(session: str, nonce: str, method: str, path: str, body: bytes) -> tuple[bytes, ...]:
    return b"request", session.encode(), nonce.encode(), method.encode(), path.encode(), body


def _response_parts(nonce: str, status: int, body: bytes) -> tuple[bytes, ...]:
    return b"answer", nonce.encode(), str(status).encode(), body


def _decode_hex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
