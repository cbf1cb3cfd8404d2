"""Records torch.profiler's trace of every rank."""

from __future__ import annotations

import os
import tempfile
from typing import Literal

import msgspec

from ..api.errors import InvalidRequest
from ..api.wire import Int32
from .base import GET_OR_POST, LOAD_SECONDS, Command, Endpoint, Rank, Server, plain_endpoint
from .registry import COMMANDS

Activity = Literal["CPU", "GPU", "CUDA_PROFILER"]
Stage = Literal["prefill", "decode"]


class StartProfile(msgspec.Struct, frozen=True):
    """Record torch.profiler's trace into ``folder``, one file a rank, until ``StopProfile`` or for ``num_steps``.

    ``start_step``: the engine's step to begin with. ``by_stage``: ``num_steps`` of prefill and as many of decode, each
    in a file of its own. The activity CUDA_PROFILER starts the capture of a tool that runs the server, as Nsight."""

    folder: str
    num_steps: int | None = None
    activities: tuple[Activity, ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False
    by_stage: bool = False
    start_step: int | None = None
    prefix: str | None = None
    profile_id: str | None = None


class StopProfile(msgspec.Struct, frozen=True):
    """Writes the trace that ``/start_profile`` began; 409 where none is recorded."""


class ProfileRequest(msgspec.Struct):
    output_dir: str | None = None
    num_steps: Int32 | None = None
    activities: tuple[Activity, ...] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None
    profile_by_stage: bool | None = None
    start_step: Int32 | None = None
    profile_prefix: str | None = None
    profile_id: str | None = None
    merge_profiles: bool | None = None


def default_folder() -> str:
    """Returns the folder of traces that no request names."""
    return os.environ.get("SGLANG_TORCH_PROFILER_DIR") or tempfile.gettempdir()


def run_start(rank: Rank, command: StartProfile) -> str:
    return rank.profiler.start(command)


def run_stop(rank: Rank, command: StopProfile) -> str:
    return rank.profiler.stop()


async def start_profile(server: Server, body: ProfileRequest) -> str:
    """Records torch.profiler's trace of every rank until ``/stop_profile``, or for ``num_steps`` steps; 409 while one
    is recorded. The answer's message is the file's path. ``profile_by_stage``: ``num_steps`` of prefill and of decode,
    in two files. ``start_step`` counts from the engine's start. The default of ``output_dir`` is
    ``SGLANG_TORCH_PROFILER_DIR`` of the server's environment, or the folder of temporary files."""
    if body.merge_profiles:
        raise InvalidRequest("merge_profiles is not supported here; each rank writes a file of its own.",
                             param="merge_profiles", code="unsupported_parameter")
    folder = body.output_dir or default_folder()
    return await server.execute(StartProfile(
        folder, body.num_steps, body.activities or ("CPU", "GPU"), bool(body.with_stack), bool(body.record_shapes),
        bool(body.profile_by_stage), body.start_step, body.profile_prefix, body.profile_id))


COMMANDS.register("start_profile")(Command(StartProfile, run_start, (
    Endpoint("/start_profile", start_profile, ProfileRequest, methods=GET_OR_POST),), while_busy=True))
COMMANDS.register("stop_profile")(Command(StopProfile, run_stop, (
    plain_endpoint("/stop_profile", StopProfile, methods=GET_OR_POST),), while_busy=True, timeout=LOAD_SECONDS))
