"""Loads another checkpoint of the same architecture."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from ..api.errors import ConfigError, Conflict, InvalidRequest, ServingError
from .base import LOAD_SECONDS, Broadcast, Command, Endpoint, Rank, Server
from .memory import resume
from .registry import COMMANDS
from .weight_update import refresh_identity

_ABORT_GRACE_SECONDS = 10.0  # aborted requests free their pages once their peers have answered


class UpdateWeights(msgspec.Struct, frozen=True):
    """Load another checkpoint of the same architecture, from a local folder or the hub, and drop the prefix cache.

    Refused while requests run that are not paused. The checkpoint is checked before the first weight is changed: one
    that does not fit changes nothing.
    """

    model_path: str
    revision: str | None = None


class UpdateWeightsRequest(msgspec.Struct):
    model_path: str
    revision: str | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None


def run(rank: Rank, command: UpdateWeights) -> str:
    if "weights" in rank.released:
        resume(rank, ("weights",))
    _check_on_all_ranks(rank, lambda: rank.runner.check_weights(command.model_path, command.revision))
    # Sessions end before the first weight is changed and begin again after the last: no KV cache that was computed
    # with the previous weights, or that a peer has computed with others, is ever mistaken for one of the new ones.
    rank.peers.leave()
    rank.runner.update_weights(command.model_path, command.revision)
    rank.weights.forget()
    rank.forget_pages()
    rank.tp.barrier()
    rank.peers.join(rank.runner.model, rank.runner.draft_identity)
    rank.tp.barrier()  # a command after the reply finds all ranks updated
    return f"The weights are those of {command.model_path}."


def _check_on_all_ranks(rank: Rank, check: Callable[[], None]) -> None:
    """Runs ``check`` on all ranks of the group; raises InvalidRequest on all of them where it failed on one."""
    reason = None
    try:
        check()
    except (ConfigError, ServingError) as error:
        reason = str(error)
    if not rank.tp.all_true(reason is None):
        raise InvalidRequest(reason or "Another rank cannot do it.", param="model_path")


async def update_weights_from_disk(server: Server, body: UpdateWeightsRequest) -> str:
    """Loads another checkpoint of the same architecture; 400 where it does not fit, 409 while requests run unpaused.

    One that does not fit changes nothing. ``abort_all_requests`` aborts running requests instead of refusing.
    ``weight_version`` names the new weights.
    """
    context = server.context
    if body.abort_all_requests:
        context.client.abort("")
    async with context.status.weights_lock:
        deadline = asyncio.get_running_loop().time() + (_ABORT_GRACE_SECONDS if body.abort_all_requests else 0.0)
        while True:
            try:
                done = await server.execute(UpdateWeights(body.model_path, body.revision))
                await refresh_identity(server)
                break
            except Conflict:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(0.05)
    context.model.weights_path = body.model_path
    context.model.weight_version = body.weight_version or context.model.weight_version
    return done


async def update_weights(server: Server, body: UpdateWeightsRequest) -> str:
    """``/update_weights_from_disk`` by its old name."""
    return await update_weights_from_disk(server, body)


COMMANDS.register("update_weights_from_disk")(Command(UpdateWeights, run, (
    Endpoint("/update_weights_from_disk", update_weights_from_disk, UpdateWeightsRequest,
             broadcast=Broadcast(slow=True, renames=True)),
    Endpoint("/update_weights", update_weights, UpdateWeightsRequest, broadcast=Broadcast(slow=True, renames=True)),
), while_paused=True, synchronizes=True, timeout=LOAD_SECONDS))
