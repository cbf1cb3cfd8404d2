"""Changes the role of a server while it runs."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from ..api.errors import ConfigError, InvalidRequest, ServingError, WorkerUnavailable
from ..config.roles import ROLES, check_role
from .base import Command, Endpoint, Rank, Server
from .limits import SchedulerLimits
from .limits import run as set_limits
from .registry import COMMANDS

if TYPE_CHECKING:
    from ..serving.context.serving_context import ServingContext

LINGER_SECONDS = 10.0
"""A bootstrap server that is not needed any more answers for so long: requests may be on their way."""
_POLL_SECONDS = 0.5


class SwitchRole(msgspec.Struct, frozen=True):
    role: str
    limits: SchedulerLimits | None = None


class SwitchRoleRequest(msgspec.Struct):
    role: str | None = None
    new_role: str | None = None
    """SGLang's name of ``role``."""
    server_args: SchedulerLimits | None = None


def run(rank: Rank, command: SwitchRole) -> str:
    if rank.roles is None:
        raise InvalidRequest("The role of this server is fixed; start it with --enable-pd-role-switch.")
    if command.limits is not None:
        set_limits(rank, command.limits)
    try:
        rank.roles.switch_role(command.role)
    except ConfigError as error:
        raise WorkerUnavailable(str(error)) from None
    label = ROLES.get(command.role).label
    return f"This is a {label} server now; requests that run end in the role that they began in."


async def switch_role(server: Server, body: SwitchRoleRequest) -> str:
    """Changes the server's role to `role`: `prefill`, `decode`, or `null` for both phases.

    It needs `--enable-pd-role-switch`. Later requests are served in the new role; those that run end as they began, so
    nothing is drained. Weights, prefix cache and CUDA graphs stay, and the bootstrap port is open while the role is
    `prefill`. `server_args` changes limits with the role, as `/set_internal_state` does. A router's `/switch_role`
    takes the worker's `url` too, and sends it requests of its new role from then on.
    """
    context = server.context
    name = body.role if body.role is not None else body.new_role
    if name is None:
        raise InvalidRequest("role is missing: prefill, decode or null.", param="role")
    name = check_role(name, "role")
    if not context.role.switchable:
        raise InvalidRequest("The role of this server is fixed; start it with --enable-pd-role-switch.", param="role")
    async with context.status.weights_lock:
        return await _switch(server, name, body.server_args)


async def _switch(server: Server, name: str, limits: SchedulerLimits | None) -> str:
    context = server.context
    before = context.role.facts
    if ROLES.get(name).sends_kv:
        try:
            await context.role.start_bootstrap()
        except ConfigError as error:
            raise WorkerUnavailable(str(error)) from None
    done = await server.execute(SwitchRole(name, limits))
    context.role.set(name)
    status = context.status
    assert status.ready is not None
    states = await context.client.states()
    status.ready = msgspec.structs.replace(status.ready, pair_key=states[0].pair_key)
    if before.sends_kv and not context.role.facts.sends_kv:
        if context.role.closing is not None:
            context.role.closing.cancel()
        context.role.closing = asyncio.create_task(_close_bootstrap(context))
    return done


async def _close_bootstrap(context: ServingContext) -> None:
    """Closes the bootstrap port once no prompt is sent any more, unless the role is back meanwhile."""
    end = time.monotonic() + LINGER_SECONDS
    while not context.role.facts.sends_kv:
        try:
            states = await context.client.states()
        except ServingError:  # the engine has died, and the server ends
            return
        if time.monotonic() >= end and not any(state.num_transferring for state in states):
            async with context.status.weights_lock:  # not while the role changes
                if not context.role.facts.sends_kv:
                    await context.role.stop_bootstrap()
            return
        await asyncio.sleep(_POLL_SECONDS)


COMMANDS.register("switch_role")(Command(SwitchRole, run, (
    Endpoint("/switch_role", switch_role, SwitchRoleRequest, broadcast=None),
    Endpoint("/pd_role_switch", switch_role, SwitchRoleRequest, broadcast=None)), while_busy=True))
