"""Forwards HTTP requests to another process of this server, byte for byte."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from ..api.errors import WorkerUnavailable

_HOP_BY_HOP = frozenset(("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
                         "transfer-encoding", "upgrade", "content-length", "host", "expect"))
SHOWN_ADDRESS = "X-Forwarded-For"


class Forwarder:
    """Forwards requests to the process that listens on a Unix socket. Use as an asynchronous context manager."""

    def __init__(self, path: str):
        self._path = path

    async def __aenter__(self) -> Forwarder:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(self._path, limit=0), timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def forward(self, request: web.Request) -> web.StreamResponse:
        """Answers with what the other process answers, as it comes. A client that leaves cancels the request there.
        Raises WorkerUnavailable where the other process cannot be reached."""
        headers = _passed_on(request.headers)
        if SHOWN_ADDRESS not in headers and request.remote:
            headers[SHOWN_ADDRESS] = request.remote
        body = await request.read() if request._read_bytes is not None else request.content
        try:
            answer = await self._session.request(
                request.method, URL(f"http://main{request.raw_path}", encoded=True), headers=headers,
                data=body if request.can_read_body or body is not request.content else None, allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Content-Type"))
        except aiohttp.ClientConnectionError as error:
            raise WorkerUnavailable(f"The server's main process does not answer: {error}.", retry_after=1.0) from None
        async with answer:
            response = web.StreamResponse(status=answer.status, reason=answer.reason,
                                          headers=_passed_on(answer.headers))
            if (length := answer.content_length) is not None:
                response.content_length = length
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response


def _passed_on(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP)
