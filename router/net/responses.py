"""Answers of the router's own, as bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from ...common.api.errors import ServingError
from ...common.api.unreadable import UNREADABLE
from ...common.serving.messages.answer import error_body

if TYPE_CHECKING:
    from .request import Request

_ANTHROPIC = b"/v1/messages"
_REASONS = {status.value: status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}


@dataclasses.dataclass(frozen=True)
class Response:
    """A complete answer; ``headers`` are further ones beside the content's and the request id's."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Response:
        return cls(status, msgspec.json.encode(value))

    @classmethod
    def error(cls, error: ServingError, path: bytes = b"") -> Response:
        """OpenAI's error object, and Anthropic's where ``path`` is of its API; with Retry-After where it is known."""
        headers = (("retry-after", str(max(1, round(error.retry_after)))),) if error.retry_after is not None else ()
        told = error_body(error) if path.startswith(_ANTHROPIC) else error.to_openai()
        return cls(error.status, msgspec.json.encode(told), headers=headers)

    def encode(self, request_id: bytes, *, head_only: bool = False, close: bool = False,
               more: bytes = b"") -> bytes:
        """The answer's bytes; ``more`` are further header lines."""
        lines = [f"HTTP/1.1 {self.status} {_REASONS.get(self.status, 'Unknown')}", f"content-type: {self.content_type}",
                 f"content-length: {len(self.body)}", "x-request-id: " + request_id.decode("latin-1"),
                 *(f"{name}: {value}" for name, value in self.headers)]
        if close:
            lines.append("connection: close")
        head = ("\r\n".join(lines) + "\r\n").encode("latin-1") + more + b"\r\n"
        return head if head_only else head + self.body


class HeadersTooLarge(ServingError):
    """More header bytes than a request of ours ever needs."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class MethodNotAllowed(ServingError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


def check_method(request: Request, methods: Sequence[bytes]) -> None:
    """Raises MethodNotAllowed."""
    if request.method not in methods:
        allowed = ", ".join(method.decode() for method in methods)
        raise MethodNotAllowed(f"{request.path.decode('latin-1')} takes {allowed}, not {request.method.decode()}.")


class SlowRequest(ServingError):
    """The client stopped in the middle of its request."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


def said(body: bytes) -> str:
    """The sentence of a worker's error, or the beginning of what it answered instead."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (*UNREADABLE, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def error_event(error: ServingError, path: bytes) -> bytes:
    """A server-sent event that tells a streaming client why its stream ends, in the form of the API that it speaks."""
    if path.startswith(_ANTHROPIC):
        told: Any = error_body(error)
    elif path == b"/v1/responses":
        told = {"type": "error", "code": error.code, "message": error.message, "param": None}
    else:
        return b"data: " + msgspec.json.encode(error.to_openai()) + b"\n\n"
    return b"event: error\ndata: " + msgspec.json.encode(told) + b"\n\n"
