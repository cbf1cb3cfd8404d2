"""Sends the running weights to a new server, which takes them in place of a checkpoint."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Annotated, Literal

import msgspec

from ..api.errors import InvalidRequest
from .base import LOAD_SECONDS, Command, Endpoint, Rank, Server
from .registry import COMMANDS

_GROUP = "weight_send_group"


class JoinReceiver(msgspec.Struct, frozen=True):
    """Wait for the ranks of a new server, each at a port of its own."""

    backend: str
    address: str
    ports: list[int]
    name: str


class SendWeights(msgspec.Struct, frozen=True):
    """Send all weights to the ranks that have joined."""

    name: str
    weight_version: str


class InitSendGroupRequest(msgspec.Struct):
    master_address: str
    ports: str
    group_rank: Annotated[int, msgspec.Meta(ge=0, le=0)] = 0
    world_size: Annotated[int, msgspec.Meta(ge=2, le=2)] = 2
    group_name: str = _GROUP
    backend: Literal["nccl", "gloo"] = "nccl"


class SendToInstanceRequest(msgspec.Struct):
    master_address: str
    ports: str
    group_name: str = _GROUP


def run_join(rank: Rank, command: JoinReceiver) -> Future[str]:
    return rank.weight_sender.join(command.backend, command.address, command.ports, command.name)


def run_send(rank: Rank, command: SendWeights) -> Future[str]:
    return rank.weight_sender.send(command.name, command.weight_version)


async def init_weights_send_group_for_remote_instance(server: Server, body: InitSendGroupRequest) -> str:
    """Waits for the ranks of a new server (``--load-format remote_instance``), which calls this: each of this server's
    ranks listens at its port of ``ports``, a list in a text, on ``master_address``, as rank 0 of a group of two."""
    try:
        ports = [int(port) for port in body.ports.split(",")]
    except ValueError:
        raise InvalidRequest("ports must be numbers with commas between them, one for each rank.",
                             param="ports") from None
    if not all(0 < port < 65536 for port in ports):
        raise InvalidRequest("ports must be from 1 to 65535.", param="ports")
    return await server.execute(JoinReceiver(body.backend, body.master_address, ports, body.group_name))


async def send_weights_to_remote_instance(server: Server, body: SendToInstanceRequest) -> str:
    """Sends the running weights to the ranks that have joined ``group_name``, beside the steps; their fingerprint and
    ``weight_version`` go with them. Weights do not change meanwhile."""
    context = server.context
    async with context.status.weights_lock:
        return await server.execute(SendWeights(body.group_name, context.model.weight_version))


COMMANDS.register("init_weights_send_group")(Command(JoinReceiver, run_join, (
    Endpoint("/init_weights_send_group_for_remote_instance", init_weights_send_group_for_remote_instance,
             InitSendGroupRequest, broadcast=None),), while_busy=True, timeout=LOAD_SECONDS))
COMMANDS.register("send_weights")(Command(SendWeights, run_send, (
    Endpoint("/send_weights_to_remote_instance", send_weights_to_remote_instance, SendToInstanceRequest,
             broadcast=None),), while_busy=True, timeout=LOAD_SECONDS))
