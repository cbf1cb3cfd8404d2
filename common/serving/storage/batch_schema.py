"""OpenAI's batches: the job, its input lines, its output lines."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from ...api.errors import InvalidRequest
from ...api.unreadable import UNREADABLE
from ...api.wire import Int32
from ..protocol.decoding import BodyDecoder
from .file_schema import expiry_seconds

MAX_LINES = 50_000  # OpenAI's
MAX_ERRORS = 100  # of an input file that are reported
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_WINDOW_SECONDS = 7 * 86_400

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int


class BatchError(msgspec.Struct):
    """An error in a line of the input file; lines count from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: str = "list"


class Batch(msgspec.Struct, kw_only=True):
    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    status: Status
    created_at: int
    expires_at: int
    request_counts: RequestCounts
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    metadata: dict[str, str] | None = None
    object: str = "batch"


class OutputExpiry(msgspec.Struct):
    anchor: str | None = None
    seconds: Int32 | None = None


class CreateBatch(msgspec.Struct, kw_only=True):
    """``completion_window`` is OpenAI's '24h', or another number of s, m, h or d up to 7 days."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None

    @property
    def window_seconds(self) -> int:
        """Raises InvalidRequest."""
        match = _WINDOW.fullmatch(self.completion_window)
        seconds = int(match[1]) * _UNIT_SECONDS[match[2]] if match else 0
        if not 0 < seconds <= _MAX_WINDOW_SECONDS:
            raise InvalidRequest("completion_window must be a time such as '24h' or '30m', 7 days at most, got "
                                 f"{self.completion_window[:80]!r}.", param="completion_window")
        return seconds

    @property
    def keep_seconds(self) -> int | None:
        """The retention of its output files, None for ever; raises InvalidRequest."""
        given = self.output_expires_after
        return None if given is None else expiry_seconds(given.anchor, given.seconds, "output_expires_after")


class InputLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    code: str
    message: str


class OutputLine(msgspec.Struct):
    """A line of an output or error file: either a response of any status, or the error without one."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None


_create = BodyDecoder(CreateBatch)
_line = msgspec.json.Decoder(InputLine)


def decode_create(body: bytes, endpoints: frozenset[str]) -> CreateBatch:
    """Raises InvalidRequest."""
    request = _create.decode(body)
    if request.endpoint not in endpoints:
        raise InvalidRequest(f"endpoint must be one of {', '.join(sorted(endpoints))}, got {request.endpoint[:80]!r}.",
                             param="endpoint")
    metadata = request.metadata or {}
    if len(metadata) > 16 or any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise InvalidRequest("metadata holds up to 16 pairs, of keys up to 64 and values up to 512 characters.",
                             param="metadata")
    return request


def decode_line(text: bytes, number: int, endpoint: str) -> InputLine | BatchError:
    """One line of an input file, or its error."""
    try:
        line = _line.decode(text)
    except msgspec.ValidationError as error:
        message = f"The line must be an object with custom_id, method, url and body: {error}."
        return BatchError("invalid_request", message, number)
    except UNREADABLE:
        return BatchError("invalid_json_line", "The line is not valid JSON.", number)
    if line.method != "POST":
        return BatchError("invalid_method", f"method must be 'POST', got {line.method[:80]!r}.", number, "method")
    if line.url not in (endpoint, endpoint.removeprefix("/v1")):  # SGLang's documents leave the prefix out
        return BatchError("mismatched_endpoint", f"url must be the batch's endpoint {endpoint}, got {line.url[:80]!r}.",
                          number, "url")
    if not bytes(line.body).startswith(b"{"):
        return BatchError("invalid_body", "body must be a JSON object.", number, "body")
    return line
