"""Slows the engine down, for tests of what is around it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .base import GET_OR_POST, Command, Endpoint, Rank, Server
from .registry import COMMANDS

MAX_SECONDS = 10.0  # a step that takes much longer is taken for one that hangs


class SlowDown(msgspec.Struct, frozen=True):
    """Sleep ``seconds`` after every step of the scheduler."""

    seconds: float


class SlowDownRequest(msgspec.Struct):
    forward_sleep_time: Annotated[float, msgspec.Meta(ge=0.0, le=MAX_SECONDS)] | None = None


def run(rank: Rank, command: SlowDown) -> str:
    rank.step_delay = command.seconds
    return f"Each step is followed by {command.seconds:g} s of sleep." if command.seconds else "Steps are not delayed."


async def slow_down(server: Server, body: SlowDownRequest) -> str:
    """Delays every step of the scheduler by ``forward_sleep_time`` seconds, up to 10; without it no longer.

    A test lets requests gather on one side of a pair so.
    """
    return await server.execute(SlowDown(body.forward_sleep_time or 0.0))


COMMANDS.register("slow_down")(Command(SlowDown, run, (
    Endpoint("/slow_down", slow_down, SlowDownRequest, methods=GET_OR_POST),), while_busy=True))
