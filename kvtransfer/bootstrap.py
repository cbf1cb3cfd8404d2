"""The bootstrap server: where a decode rank learns how to reach the ranks of a prefill server.

It runs in a prefill server's front process. The ranks register themselves when they are up; whoever registers last
for a rank is the one, so a restarted engine replaces its predecessor.

With ``--cluster-secret`` a caller first asks for the server's random session, and seals each request over it, a nonce
of its own, method, path and body; a nonce counts once. The answer is sealed over the same nonce, so neither
an old request nor an old answer can be played again.
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
from .protocol.authentication import OTHER_SECRET, Secret, secret_of
from .protocol.messages import RankInfo

logger = logging.getLogger("baton.kvtransfer")

MAX_BODY_BYTES = 1024 * 1024  # a RankInfo is a few hundred bytes

_NONCE, _SEAL = "Baton-Nonce", "Baton-Seal"


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OtherSecret(Exception):
    """The bootstrap server does not share our ``--cluster-secret``."""


class NotRegistered(Exception):
    """The bootstrap server is up, and not all of its ranks are (yet)."""


class BootstrapServer:
    """``async with BootstrapServer(host, port):`` serves until the block is left.

    ``PUT /register`` takes a RankInfo (JSON), ``GET /ranks`` answers all of them once they are complete, ``GET
    /session`` what seals need, ``GET /health`` answers 200. ``port`` 0 takes a free one; ``.port`` is the one in use.
    ``secret`` is ``--cluster-secret``. Entering raises ConfigError when the port is occupied.
    """

    def __init__(self, host: str, port: int, secret: str | None = None):
        self.host = host
        self.port = port
        self.ranks: dict[tuple[int, int, int], RankInfo] = {}  # by data-parallel rank, stage and place in its group
        self._secret = secret_of(secret)
        self._session = secrets.token_hex(16)
        self._nonces: set[str] = set()
        self._refused: set[str | None] = set()
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._check])
        app.add_routes([web.put("/register", self._register), web.get("/ranks", self._tell_ranks),
                        web.get("/session", self._tell_session), web.get("/health", self._health)])
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
            if self._secret is None and _SEAL in request.headers:
                self._warn_of(request)
            return await handler(request)
        nonce, seal = request.headers.get(_NONCE, ""), request.headers.get(_SEAL, "")
        parts = _request_parts(self._session, nonce, request.method, request.path_qs, await request.read())
        if nonce in self._nonces or not self._secret.verifies(_unhex(seal), *parts):
            self._warn_of(request)
            return _failure(Unauthorized("The request does not bear the seal of this server's --cluster-secret.",
                                         code="wrong_cluster_secret"))
        self._nonces.add(nonce)  # 80 bytes for each connection of a decode rank
        response = await handler(request)
        assert isinstance(response, web.Response) and isinstance(response.body, bytes)
        response.headers[_SEAL] = self._secret.mac(*_answer_parts(nonce, response.status, response.body)).hex()
        return response

    def _warn_of(self, request: web.Request) -> None:
        """Once for each host: it asks again for every request."""
        if request.remote not in self._refused:
            self._refused.add(request.remote)
            logger.warning("A server at %s is refused: %s.", request.remote, OTHER_SECRET)

    async def _tell_session(self, request: web.Request) -> web.Response:
        return web.json_response({"session": self._session})

    async def _register(self, request: web.Request) -> web.Response:
        try:
            info = msgspec.json.decode(await request.read(), type=RankInfo)
        except UNREADABLE as error:
            return _failure(InvalidRequest(f"The body is no rank description: {error}."))
        self.ranks[info.dp_rank, info.pp_rank, info.rank] = info
        return web.json_response({})

    async def _tell_ranks(self, request: web.Request) -> web.Response:
        first = self.ranks.get((0, 0, 0))
        sizes = (first.dp_size, first.pp_size, first.tp_size) if first is not None else (1, 1, 1)
        groups, stages, places = map(range, sizes)
        ranks = [self.ranks.get(place) for place in itertools.product(groups, stages, places)]
        if None in ranks:
            return _failure(NotFound(f"{len(self.ranks)} of the {len(ranks)} ranks of this prefill server have "
                                     "registered."))
        return web.Response(body=msgspec.json.encode(ranks), content_type="application/json")

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({})


def _failure(error: ServingError) -> web.Response:
    return web.json_response(error.to_openai(), status=error.status)


def register_rank(url: str, info: RankInfo, deadline: float = 30.0, secret: str | None = None) -> None:
    """Register at the bootstrap server at ``url``, trying for ``deadline`` seconds; then raises ConfigError."""
    parts = urllib.parse.urlsplit(url)
    address = (parts.hostname or "127.0.0.1", parts.port or 80)
    end = time.monotonic() + deadline
    while True:
        try:
            status, body = _request(address, "PUT", "/register", msgspec.json.encode(info), 5.0, secret_of(secret))
            if status == 200:
                return
            reason = f"it answered {status}: {body[:200].decode(errors='replace')}"
        except OSError as error:
            reason = str(error)
        except OtherSecret:
            raise ConfigError(f"The bootstrap server {url} refuses rank {info.rank}: {OTHER_SECRET}.") from None
        if time.monotonic() >= end:
            raise ConfigError(f"Rank {info.rank} could not register at the bootstrap server {url}: {reason}.")
        time.sleep(0.1)


def fetch_ranks(address: tuple[str, int], timeout: float, secret: Secret | None = None) -> list[RankInfo]:
    """All ranks, by data-parallel rank, stage and place in its group; blocking. Raises NotRegistered, OtherSecret, or
    OSError when none answers intelligibly."""
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
    """Status and body of a sealed exchange. Raises OSError, and OtherSecret when one of the seals is not right."""
    nonce, headers = secrets.token_hex(16), {}
    if secret is not None:
        status, answer, _ = _exchange(address, "GET", "/session", None, timeout, {})
        session = _session_of(answer) if status == 200 else ""
        parts = _request_parts(session, nonce, method, path, body or b"")
        headers = {_NONCE: nonce, _SEAL: secret.mac(*parts).hex()}
    status, answer, seal = _exchange(address, method, path, body, timeout, headers)
    if status == 401:
        raise OtherSecret
    if secret is not None and not secret.verifies(_unhex(seal), *_answer_parts(nonce, status, answer)):
        raise OtherSecret
    return status, answer


def _exchange(address: tuple[str, int], method: str, path: str, body: bytes | None, timeout: float,
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
            return response.status, response.read(MAX_BODY_BYTES), response.headers.get(_SEAL, "")
    except http.client.HTTPException as error:
        raise OSError(f"it speaks no HTTP ({error})") from None
    except UnicodeError as error:  # of the resolver
        raise OSError(f"{address[0]!r} is no host name ({error})") from None
    finally:
        connection.close()


class _Deadline:
    """Of a whole exchange: a socket's own timeout begins anew with each byte that a peer lets drip. Past it the
    connection is shut down, and leaving the block raises TimeoutError."""

    def __init__(self, sock: socket.socket, seconds: float):
        self._sock = sock
        self._seconds = seconds
        self._over = False
        self._timer = threading.Timer(seconds, self._shut_down)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()
        self._timer.join()
        if self._over:
            raise TimeoutError(f"it did not answer within {self._seconds:g} s") from None

    def _shut_down(self) -> None:
        self._over = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)


def _session_of(answer: bytes) -> str:
    try:
        return msgspec.json.decode(answer, type=dict[str, str]).get("session", "")
    except UNREADABLE:
        raise OSError("it answered something else than its session") from None


def _request_parts(session: str, nonce: str, method: str, path: str, body: bytes) -> tuple[bytes, ...]:
    return b"request", session.encode(), nonce.encode(), method.encode(), path.encode(), body


def _answer_parts(nonce: str, status: int, body: bytes) -> tuple[bytes, ...]:
    return b"answer", nonce.encode(), str(status).encode(), body


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
