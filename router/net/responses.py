"""The router's own HTTP responses, as bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from ...common.api.errors import ServingError
from ...common.api.unreadable import UNREADABLE
from ...common.serving.messages.schema import error_body

if TYPE_CHECKING:
    from .request import Request

_ANTHROPIC = b"/v1/messages"
_REASONS = {status.value: status.phrase for status in HTTPStatus} | {499: "Client Closed Request"}


@dataclasses.dataclass(frozen=True)
class Response:
    """A complete response; ``headers`` are added to those of the content and the request id."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Response:
        return cls(status, msgspec.json.encode(value))

    @classmethod
    def error(cls, error: ServingError, path: bytes = b"") -> Response:
        """A response with OpenAI's error object, or Anthropic's for its ``path``; with Retry-After if known."""
        headers = (("retry-after", str(max(1, round(error.retry_after)))),) if error.retry_after is not None else ()
        body = error_body(error) if path.startswith(_ANTHROPIC) else error.response_body()
        return cls(error.status, msgspec.json.encode(body), headers=headers)

    def encode(self, request_id: bytes, *, head_only: bool = False, close: bool = False,
               header_lines: bytes = b"") -> bytes:
        """The response's bytes; ``header_lines`` are added."""
        lines = [f"HTTP/1.1 {self.status} {_REASONS.get(self.status, 'Unknown')}", f"content-type: {self.content_type}",
                 f"content-length: {len(self.body)}", "x-request-id: " + request_id.decode("latin-1"),
                 *(f"{name}: {value}" for name, value in self.headers)]
        if close:
            lines.append("connection: close")
        head = ("\r\n".join(lines) + "\r\n").encode("latin-1") + header_lines + b"\r\n"
        return head if head_only else head + self.body


class HeadersTooLarge(ServingError):
    """The request's head, or its trailers, exceed the limit."""

    status = 431
    type = "invalid_request_error"
    code = "headers_too_large"


class MethodNotAllowed(ServingError):
    """The path does not take the request's method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


def check_method(request: Request, methods: Sequence[bytes]) -> None:
    """Raises MethodNotAllowed unless the request's method is one of ``methods``."""
    if request.method not in methods:
        allowed = ", ".join(method.decode() for method in methods)
        raise MethodNotAllowed(f"{request.path.decode('latin-1')} takes {allowed}, not {request.method.decode()}.")


class SlowRequest(ServingError):
    """The client stopped in the middle of its request."""

    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


def error_message(body: bytes) -> str:
    """The message of a worker's error, or the beginning of the body if it has none."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (*UNREADABLE, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def error_event(error: ServingError, path: bytes) -> bytes:
    """A server-sent event that ends a stream with an error, in the form of the request's API."""
    if path.startswith(_ANTHROPIC):
        body: Any = error_body(error)
    elif path == b"/v1/responses":
        body = {"type": "error", "code": error.code, "message": error.message, "param": None}
    else:
        return b"data: " + msgspec.json.encode(error.to_openai()) + b"\n\n"
    return b"event: error\ndata: " + msgspec.json.encode(body) + b"\n\n"
