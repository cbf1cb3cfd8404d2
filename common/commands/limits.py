"""Changes the scheduler's limits while it runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from ..api.errors import InvalidRequest
from ..api.wire import Int32
from ..config.server.schedule import SCHEDULE_POLICIES
from .base import Command, Endpoint, Rank, Server
from .registry import COMMANDS


class SchedulerLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_running_requests: Int32 | None = None
    chunked_prefill_size: Int32 | None = None
    schedule_policy: str | None = None


class InternalStateRequest(msgspec.Struct):
    server_args: SchedulerLimits


def run(rank: Rank, command: SchedulerLimits) -> str:
    """Sets what is not None. No limit may exceed its value at startup, because memory was sized by that."""
    started = rank.config.schedule
    given = _given(command)
    limits = {"max_running_requests": started.max_running_requests,
              "chunked_prefill_size": started.chunked_prefill_size}
    if started.chunked_prefill_size < 0:
        limits["chunked_prefill_size"] = started.max_prefill_tokens
    for name, limit in limits.items():
        if name in given and not 1 <= given[name] <= limit:
            raise InvalidRequest(f"{name} must be between 1 and {limit}, which the server started with, not "
                                 f"{given[name]}.", param=name)
    if given.get("schedule_policy", "fcfs") not in SCHEDULE_POLICIES:
        raise InvalidRequest(f"schedule_policy must be one of {', '.join(SCHEDULE_POLICIES)}.", param="schedule_policy")
    rank.batcher.set_args(dataclasses.replace(rank.batcher.args, **given))
    return "Set " + ", ".join(f"{name} to {value}" for name, value in given.items()) + "."


async def set_internal_state(server: Server, body: InternalStateRequest) -> str:
    """Changes limits of the scheduler while it runs.

    ``server_args`` has one or more of ``max_running_requests``, ``chunked_prefill_size`` (neither above its value at
    startup) and ``schedule_policy``.
    """
    if not _given(body.server_args):
        names = ", ".join(SchedulerLimits.__struct_fields__)
        raise InvalidRequest(f"server_args must hold one of {names}.", param="server_args")
    return await server.execute(body.server_args)


def _given(limits: SchedulerLimits) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(limits).items() if value is not None}


COMMANDS.register("set_internal_state")(Command(SchedulerLimits, run, (
    Endpoint("/set_internal_state", set_internal_state, InternalStateRequest, methods=("POST", "PUT")),
), while_busy=True))
