"""Request bodies of the administrative endpoints."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ...api.commands import (
    Activity,
    MemoryKind,
    PauseMode,
)
from ...api.wire import Int32


class UpdateWeightsRequest(msgspec.Struct):
    model_path: str
    revision: str | None = None
    abort_all_requests: bool | None = None


class MemoryRequest(msgspec.Struct):
    tags: tuple[MemoryKind, ...] | None = None


class PauseRequest(msgspec.Struct):
    mode: PauseMode | None = None


class ProfileRequest(msgspec.Struct):
    output_dir: str | None = None
    num_steps: Int32 | None = None
    activities: tuple[Activity, ...] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None


class DumpRequest(msgspec.Struct):
    output_dir: str | None = None


class SchedulerLimits(msgspec.Struct, forbid_unknown_fields=True):
    max_running_requests: Int32 | None = None
    chunked_prefill_size: Int32 | None = None
    schedule_policy: str | None = None


class InternalStateRequest(msgspec.Struct):
    server_args: SchedulerLimits


class PrefillAddress(msgspec.Struct):
    bootstrap_host: str
    bootstrap_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class AbortRequest(msgspec.Struct):
    rid: str | None = None
    abort_all: bool | None = None
