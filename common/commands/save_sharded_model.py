"""Writes the running weights to files, each rank its own parts, for ``--load-format sharded_state``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..api.errors import InvalidRequest
from .base import LOAD_SECONDS, Command, Endpoint, Rank, Server
from .registry import COMMANDS

_PATTERN = "model-rank-{rank}-part-{part}.safetensors"


class SaveShardedModel(msgspec.Struct, frozen=True):
    """Write each rank's weights."""

    path: str
    pattern: str
    max_size: int


class SaveShardedRequest(msgspec.Struct):
    path: str
    pattern: str | None = None
    max_size: Annotated[int, msgspec.Meta(ge=1, le=2**62)] | None = None


def run_save(rank: Rank, command: SaveShardedModel) -> str:
    count = rank.runner.save_weights(command.path, command.pattern, command.max_size)
    others = f", and those of {rank.tp.size - 1} other ranks" if rank.tp.size > 1 else ""
    return f"{count} bytes of rank {rank.tp.rank}{others} are in {command.path}."


async def save_sharded_model(server: Server, body: SaveShardedRequest) -> str:
    """Writes the weights to the folder ``path`` of the server's host: each rank its parts of the tensors, in files of
    at most ``max_size`` bytes (5 GiB) with names by ``pattern``, and the checkpoint's other files. ``--load-format
    sharded_state`` reads them. Requests wait meanwhile."""
    pattern = body.pattern or _PATTERN
    if "{rank}" not in pattern or "{part}" not in pattern or "/" in pattern or not pattern.endswith(".safetensors"):
        raise InvalidRequest(f"pattern must be a file's name with {{rank}} and {{part}}, such as {_PATTERN}.",
                             param="pattern")
    return await server.execute(SaveShardedModel(body.path, pattern, body.max_size or 5 << 30))


COMMANDS.register("save_sharded_model")(Command(SaveShardedModel, run_save, (
    Endpoint("/save_sharded_model", save_sharded_model, SaveShardedRequest),),
    while_busy=True, synchronizes=True, timeout=LOAD_SECONDS))
