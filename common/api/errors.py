"""Errors that reach a client, each with its HTTP status and OpenAI's error object.

Input is checked where it enters (``raise InvalidRequest(...)``); past that boundary a broken
assumption is a bug and asserts. A message is one sentence that says what to change.
"""

from __future__ import annotations

from typing import Any

_SGLANG_TYPES = {401: "AuthenticationError", 404: "NotFoundError", 409: "ConflictError", 429: "RateLimitError",
                 503: "ServiceUnavailableError"}
NON_FINITE_LOGITS = "non_finite_logits"


class ServingError(Exception):
    """Base of all errors that end a request.

    ``status`` is the HTTP status, ``type`` and ``code`` fill OpenAI's error object, and ``param``
    names the offending request field where there is one. ``retry_after`` (seconds), when given,
    becomes the ``Retry-After`` header.
    """

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None,
                 retry_after: float | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        if code is not None:
            self.code = code

    @property
    def wire_code(self) -> str:
        """The code by which ``from_code`` rebuilds this error on the other side of a process boundary."""
        own = type(self).code
        return own if self.code == own else f"{own}:{self.code}"

    def to_openai(self) -> dict[str, Any]:
        """OpenAI's error object: ``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response_body(self) -> dict[str, Any]:
        """A response: OpenAI's error object, and beside it SGLang's fields, whose ``code`` is the HTTP status."""
        kind = _SGLANG_TYPES.get(self.status, "BadRequestError" if self.status < 500 else "InternalServerError")
        return {**self.to_openai(), "object": "error", "message": self.message, "type": kind, "param": self.param,
                "code": self.status}


class PeerFailed(ServingError):
    """The other server of the pair failed in computing the request; its ``code`` is kept. Answers have the header
    ``X-Baton-Failed: peer``, so that a router blames that server."""

    code = "peer_failed"


class InvalidRequest(ServingError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class Unauthorized(ServingError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFound(ServingError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class Conflict(ServingError):
    """The request names something that is already in use (a bootstrap room, a worker URL)."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class TooLarge(ServingError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class Overloaded(ServingError):
    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class Aborted(ServingError):
    """The request was cancelled: its client left."""

    status = 499
    type = "aborted"
    code = "request_aborted"


class AbortRequested(Aborted):
    """The request was aborted by ``/abort_request`` or ``/pause_generation``: its client, which is still connected,
    gets the tokens so far."""

    code = "abort_requested"


class TransferFailed(ServingError):
    """The KV cache did not arrive: the peer died, refused, or stalled. ``cause`` is a label for metrics; the other
    server of the pair, which is notified of the failure, counts it as its peer's."""

    status = 502
    code = "kv_transfer_failed"

    def __init__(self, message: str, *, code: str | None = None, cause: str = "peer"):
        super().__init__(message, code=code)
        self.cause = cause


class PairMismatch(TransferFailed):
    """These two servers can never hand a KV cache over: other weights, layouts, backends or secrets."""

    code = "pair_mismatch"

    def __init__(self, message: str, *, code: str | None = None, cause: str = "mismatch"):
        super().__init__(message, code=code, cause=cause)


class WorkerUnavailable(ServingError):
    status = 503
    code = "worker_unavailable"


class EngineDead(WorkerUnavailable):
    """The engine died, and with it all requests; the server exits within seconds. Its answers have the header
    ``X-Baton-Engine: dead``, so that a router counts the worker as dead."""

    code = "engine_dead"


class DeadlineExceeded(ServingError):
    status = 504
    code = "deadline_exceeded"


_BY_CODE: dict[str, type[ServingError]] = {
    leaf.code: leaf
    for leaf in (ServingError, PeerFailed, InvalidRequest, Unauthorized, NotFound, Conflict, TooLarge, Overloaded,
                 Aborted, AbortRequested, TransferFailed, PairMismatch, WorkerUnavailable, EngineDead,
                 DeadlineExceeded)
}


ERROR_CODES = tuple(code for code in _BY_CODE if code != PeerFailed.code)  # which has the code of what failed there
"""The default codes of all errors."""


def from_code(code: str, message: str) -> ServingError:
    """Rebuild an error that crossed a process boundary as ``(wire_code, message)``."""
    leaf, _, special = code.partition(":")
    return _BY_CODE.get(leaf, ServingError)(message, code=special or None)


class ConfigError(ValueError):
    """A command-line or configuration mistake: one sentence that says what to change."""
