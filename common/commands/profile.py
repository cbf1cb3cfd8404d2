"""Records torch.profiler's trace of every rank."""

from __future__ import annotations

import tempfile
from typing import Literal

import msgspec

from ..api.wire import Int32
from .base import GET_OR_POST, LOAD_SECONDS, Command, Endpoint, Rank, Server, plain_endpoint
from .registry import COMMANDS

Activity = Literal["CPU", "GPU"]


class StartProfile(msgspec.Struct, frozen=True):
    """Record torch.profiler's trace into ``folder``, one file a rank, until ``StopProfile`` or for ``num_steps``."""

    folder: str
    num_steps: int | None = None
    activities: tuple[Activity, ...] = ("CPU", "GPU")
    with_stack: bool = False
    record_shapes: bool = False


class StopProfile(msgspec.Struct, frozen=True):
    """Writes the trace that ``/start_profile`` began; 409 where none is recorded."""


class ProfileRequest(msgspec.Struct):
    output_dir: str | None = None
    num_steps: Int32 | None = None
    activities: tuple[Activity, ...] | None = None
    with_stack: bool | None = None
    record_shapes: bool | None = None


def run_start(rank: Rank, command: StartProfile) -> str:
    return rank.profiler.start(command)


def run_stop(rank: Rank, command: StopProfile) -> str:
    return rank.profiler.stop()


async def start_profile(server: Server, body: ProfileRequest) -> str:
    """Records torch.profiler's trace of every rank until ``/stop_profile``, or for ``num_steps`` steps; 409 while one
    is recorded. The answer's message is the file's path."""
    return await server.execute(StartProfile(
        body.output_dir or tempfile.gettempdir(), body.num_steps, body.activities or ("CPU", "GPU"),
        bool(body.with_stack), bool(body.record_shapes)))


COMMANDS.register("start_profile")(Command(StartProfile, run_start, (
    Endpoint("/start_profile", start_profile, ProfileRequest, methods=GET_OR_POST),), while_busy=True))
COMMANDS.register("stop_profile")(Command(StopProfile, run_stop, (
    plain_endpoint("/stop_profile", StopProfile, methods=GET_OR_POST),), while_busy=True, timeout=LOAD_SECONDS))
