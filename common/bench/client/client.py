"""A cheap HTTP client: a protocol over httptools, keep-alive connections, bodies handed on as they arrive.

The cost of an event here bounds what can be measured: the clock runs while earlier events are read.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from ...api.errors import ConfigError
from .answer import Failure

_SHOWN = 300  # characters of an error's body


class Reader(Protocol):
    """Takes an answer's body as it arrives. Both methods may raise Failure."""

    def feed(self, data: bytes, now: float) -> None: ...

    def end(self) -> None:
        """Called after the last of the body."""


class Client:
    """Posts to one server, on as many connections as requests run together. Must be used from one event loop."""

    def __init__(self, base_url: str, headers: Mapping[str, str], timeout: float, clock: Callable[[], float]):
        """``timeout``: seconds that a request may take in all. Raises ConfigError for an address that is none."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or url.hostname is None:
            raise ConfigError(f"The server's address must be http://HOST:PORT, not {base_url}.")
        self._host = url.hostname
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        self._prefix = url.path.rstrip("/")
        lines = {"Host": url.netloc.rpartition("@")[2], "Content-Type": "application/json", **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._timeout = timeout
        self.clock = clock
        self._idle: list[_Connection] = []

    def request(self, path: str, body: Any) -> bytes:
        """Head and body, to be sent by ``post``."""
        payload = msgspec.json.encode(body)
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(payload)}\r\n\r\n"
        return head.encode("latin-1") + payload

    async def post(self, request: bytes, reader: Reader) -> None:
        """Send, and feed the answer to ``reader`` until it has ended. Raises Failure."""
        while True:
            connection, fresh = await self._connection()
            try:
                await connection.ask(request, reader, self._timeout)
                reader.end()
                return
            except _Stale:
                if fresh:  # its first request: the server refuses it
                    raise Failure("connection", "The server closed the connection without an answer.") from None
            finally:
                if connection.reusable:
                    self._idle.append(connection)
                else:
                    connection.close()

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection, False
        loop = asyncio.get_running_loop()
        try:
            _, made = await loop.create_connection(lambda: _Connection(self.clock), self._host, self._port,
                                                   ssl=self._tls)
        except OSError as error:
            raise Failure("connection", str(error)) from None
        return made, True

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _Stale(Exception):
    """The connection was closed before any of the answer came."""


class _Connection(asyncio.Protocol):
    """One request at a time. ``reusable``: no request is open and the server keeps the connection."""

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._reader: Reader | None = None
        self._parser: Any = None
        self._status = 0
        self._refusal = b""
        self._now = 0.0
        self.reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit it

    async def ask(self, request: bytes, reader: Reader, timeout: float) -> None:
        """Raises Failure, or _Stale."""
        assert self._transport is not None
        loop = asyncio.get_running_loop()
        ended = self._ended = loop.create_future()
        self._reader, self._status, self._refusal, self.reusable = reader, 0, b"", False
        self._parser = httptools.HttpResponseParser(self)
        timer = loop.call_later(timeout, self._fail, Failure("timeout", f"No whole answer within {timeout:g} s."))
        self._transport.write(request)
        try:
            await ended
        finally:
            timer.cancel()
            self._ended = self._reader = None

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ the transport's calls

    def data_received(self, data: bytes) -> None:
        if self._ended is None:
            self.close()  # no request is open
            return
        self._now = self._clock()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            found = error.__context__
            self._fail(found if isinstance(found, Failure) else Failure("unreadable answer", repr(found)))
        except httptools.HttpParserError as error:
            self._fail(Failure("unreadable answer", f"The server does not speak HTTP: {error}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        if self._status == 0:
            self._fail(_Stale())
        else:
            self._fail(Failure("broken stream", f"The connection was closed within the answer ({error or 'EOF'})."))

    # ------------------------------------------------------------------ the parser's calls

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._refusal += body
        elif self._reader is not None:
            self._reader.feed(body, self._now)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        if self._status != 200:
            self._fail(Failure(f"HTTP {self._status}", _error_message(self._refusal)))
        elif self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)


def _error_message(body: bytes) -> str:
    """The message of an error body, in OpenAI's form or any other."""
    try:
        found = msgspec.json.decode(body)
        error = found.get("error", found)
        return str(error["message"] if isinstance(error, dict) else error)[:_SHOWN]
    except (msgspec.MsgspecError, AttributeError, KeyError):
        return body.decode("utf-8", "replace")[:_SHOWN]
