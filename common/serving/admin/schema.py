"""Request bodies of the administrative endpoints."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ..protocol.unsupported_fields import Refused


class PrefillAddress(msgspec.Struct):
    bootstrap_host: str
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class AbortRequest(msgspec.Struct):
    rid: str | None = None
    abort_all: bool | None = None


class WeightVersion(msgspec.Struct):
    new_version: str
    abort_all_requests: bool = True


class LoggingRequest(msgspec.Struct):
    log_requests: bool | None = None
    log_requests_level: Literal[0, 1, 2, 3] | None = None
    log_requests_format: Literal["json", "text"] | None = None
    crash_dump_folder: str | None = None


_NO_DUMPS = Refused("crash_dump_folder takes the last requests when the engine dies, log_requests_level 3 logs all")
LOGGING_REFUSED = {"dump_requests_folder": _NO_DUMPS, "dump_requests_threshold": _NO_DUMPS,
                   "log_requests_target": Refused("start the server with --log-requests-target")}
