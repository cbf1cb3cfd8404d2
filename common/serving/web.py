"""JSON responses, error responses and the log of failures, shared by all handlers."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import http, web

from ..api.errors import Aborted, EngineDead, PeerFailed, ServingError
from ..obs.failures import FailureLog
from .protocol.encoding import encode

ERROR_CODE = "X-Error-Code"
"""Holds the error object's code, for a router, which reads no bodies."""

failures = FailureLog(logging.getLogger("baton.server"))


def log_failure(error: ServingError, request: web.Request | None = None, **fields: str) -> None:
    """Logs a request that fails, unless its client ended it."""
    if error.status == Aborted.status:
        return
    if request is not None:
        fields = {"path": request.path, "request_id": request.headers.get("X-Request-Id", ""), **fields}
    given = {name: value for name, value in fields.items() if value}
    failures.note(error.status, error.message, code=error.code, **given)


def is_server_fault(record: logging.LogRecord) -> bool:
    """A filter for aiohttp's log: bytes that are not HTTP, or a body that cannot be read, are answered with 400, and a
    client may leave in the middle of its answer. These are no failures of this server, and any client could fill the
    log with their tracebacks."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (http.HttpProcessingError, web.RequestPayloadError, ConnectionError))


def json_bytes(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", charset="utf-8", headers=headers)


def json_response(value: Any, status: int = 200) -> web.Response:
    return json_bytes(encode(value), status)


def error_response(error: ServingError, body: Any = None) -> web.Response:
    """OpenAI's error object, or ``body``, with Retry-After where the error has one."""
    headers = {ERROR_CODE: error.code}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if isinstance(error, EngineDead):
        headers["X-Baton-Engine"] = "dead"
    if isinstance(error, PeerFailed):
        headers["X-Baton-Failed"] = "peer"
    return json_bytes(encode(error.response_body() if body is None else body), error.status, headers)
