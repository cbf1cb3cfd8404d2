"""Process groups with a trainer, which sends weights over them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Annotated, Literal

import msgspec

from .base import LOAD_SECONDS, Broadcast, Command, Endpoint, Rank, Server, plain_endpoint
from .registry import COMMANDS

DEFAULT_GROUP = "weight_update_group"
_MAX_RANKS = 1 << 20


class InitWeightsUpdateGroup(msgspec.Struct, frozen=True):
    """Joins a process group with a trainer, which is rank 0 of ``world_size`` and listens at ``master_address`` and
    ``master_port``; answers once all members have come.

    The server's ranks are those from ``rank_offset`` on. ``backend`` is ``nccl`` on GPUs, ``gloo`` on CPUs. A trainer
    that makes the group as SGLang's do finds the server there.
    """

    master_address: str
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank_offset: Annotated[int, msgspec.Meta(ge=0, le=_MAX_RANKS)]
    world_size: Annotated[int, msgspec.Meta(ge=1, le=_MAX_RANKS)]
    group_name: str = DEFAULT_GROUP
    backend: Literal["nccl", "gloo"] = "nccl"


class DestroyWeightsUpdateGroup(msgspec.Struct, frozen=True):
    """Leaves the process group ``group_name``."""

    group_name: str = DEFAULT_GROUP


def run_init(rank: Rank, command: InitWeightsUpdateGroup) -> Future[str]:
    return rank.weights.join(command.backend, command.master_address, command.master_port, command.rank_offset,
                             command.world_size, command.group_name)


def run_destroy(rank: Rank, command: DestroyWeightsUpdateGroup) -> str:
    return rank.weights.leave(command.group_name)


async def destroy_weights_update_group(server: Server, body: DestroyWeightsUpdateGroup) -> str:
    """Leaves the process group ``group_name``, while nothing is sent over it."""
    async with server.context.status.weights_lock:
        return await server.execute(body)


COMMANDS.register("init_weights_update_group")(Command(InitWeightsUpdateGroup, run_init, (
    plain_endpoint("/init_weights_update_group", InitWeightsUpdateGroup, broadcast=Broadcast(slow=True)),),
    while_busy=True, timeout=LOAD_SECONDS))
COMMANDS.register("destroy_weights_update_group")(Command(DestroyWeightsUpdateGroup, run_destroy, (
    Endpoint("/destroy_weights_update_group", destroy_weights_update_group, DestroyWeightsUpdateGroup,
             broadcast=Broadcast(slow=True)),), while_busy=True))
