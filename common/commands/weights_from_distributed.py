"""Weights that a trainer broadcasts over a process group."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Annotated, Literal

import msgspec

from .base import LOAD_SECONDS, Broadcast, Command, Endpoint, Rank, Server
from .registry import COMMANDS
from .weight_groups import DEFAULT_GROUP
from .weight_update import UpdateOptions, send_weights

Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


class ReceiveWeights(msgspec.Struct, frozen=True):
    """Stage tensors that rank 0 of a process group broadcasts, in order; ``flattened``: as the bytes of one."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str
    flattened: bool


class FromDistributedRequest(UpdateOptions, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[Size]]
    group_name: str = DEFAULT_GROUP
    load_format: Literal["flattened_bucket"] | None = None


def run(rank: Rank, command: ReceiveWeights) -> Future[str]:
    return rank.weights.receive(command.group_name, command.names, command.dtypes, command.shapes,
                                flattened=command.flattened)


async def update_weights_from_distributed(server: Server, body: FromDistributedRequest) -> str:
    """Receives tensors that rank 0 of ``group_name`` broadcasts one after the other, and applies them as
    ``/end_weight_update`` does; after ``/begin_weight_update`` it only stages them.

    Names are those of the checkpoint, tensors whole; some of the model's suffice. 400 names those that do not fit, and
    none is applied. With the ``load_format`` ``flattened_bucket`` one tensor has the bytes of all.
    """
    stage = ReceiveWeights(body.names, body.dtypes, body.shapes, body.group_name,
                           body.load_format == "flattened_bucket")
    return await send_weights(server, stage, body)


COMMANDS.register("receive_weights")(Command(ReceiveWeights, run, (
    Endpoint("/update_weights_from_distributed", update_weights_from_distributed, FromDistributedRequest,
             broadcast=Broadcast(slow=True)),), while_busy=True, timeout=LOAD_SECONDS))
