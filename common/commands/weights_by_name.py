"""Reads a tensor of the running weights."""

from __future__ import annotations

from typing import Annotated

import msgspec

from .base import Command, Endpoint, Rank, Server
from .registry import COMMANDS


class ReadWeights(msgspec.Struct, frozen=True):
    """Read the first rows of the tensor ``name``, whole over all ranks."""

    name: str
    num_rows: int


class WeightsByNameRequest(msgspec.Struct):
    name: str
    truncate_size: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 100


def run(rank: Rank, command: ReadWeights) -> str:
    rows = rank.weights.read(command.name, command.num_rows)
    return msgspec.json.encode(rows).decode()


async def get_weights_by_name(server: Server, body: WeightsByNameRequest) -> str:
    """Reads the running weights: the first ``truncate_size`` rows of the checkpoint's tensor ``name``, whole over all
    ranks, as numbers in a list; 400 for a name that the model does not have, or holds in a quantized form."""
    return await server.execute(ReadWeights(body.name, body.truncate_size))


COMMANDS.register("get_weights_by_name")(Command(ReadWeights, run, (
    Endpoint("/get_weights_by_name", get_weights_by_name, WeightsByNameRequest, methods=("GET", "POST"),
             returns_json=True, broadcast=None),), while_busy=True, synchronizes=True))
