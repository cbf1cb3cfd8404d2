"""Loads another checkpoint of the same architecture."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from ..api.errors import ConfigError, Conflict, InvalidRequest, ServingError
from ..api.wire import Int64
from ..config.load_format import LOAD_FORMATS
from .base import LOAD_SECONDS, Broadcast, Command, Endpoint, Rank, Server
from .memory import resume
from .pause import PauseGeneration
from .registry import COMMANDS
from .weight_update import refresh_identity, weights_changing

log = logging.getLogger("baton.server")

_ABORT_GRACE_SECONDS = 10.0  # aborted requests free their pages once their peers have answered


class UpdateWeights(msgspec.Struct, frozen=True):
    """Load another checkpoint of the same architecture, from a local folder or the hub, and drop the prefix cache.

    Refused while requests run that are not paused. The checkpoint is checked before the first weight is changed: one
    that does not fit changes nothing.
    """

    model_path: str
    revision: str | None = None
    load_format: str = "auto"


class UpdateWeightsRequest(msgspec.Struct):
    model_path: str
    revision: str | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    load_format: str | None = None
    is_async: bool | None = None
    keep_pause: bool | None = None
    token_step: Int64 | None = None


def run(rank: Rank, command: UpdateWeights) -> str:
    source = command.model_path, command.revision, command.load_format
    if "weights" in rank.released:
        resume(rank, ("weights",))
    _check_on_all_ranks(rank, lambda: rank.runner.check_weights(*source))
    # Sessions end before the first weight is changed and begin again after the last: no KV cache that was computed
    # with the previous weights, or that a peer has computed with others, is ever mistaken for one of the new ones.
    rank.peers.leave()
    rank.runner.update_weights(*source)
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
    ``weight_version`` names the new weights; without it the trainer's ``token_step`` does, where it is given.
    ``load_format`` is a value of --load-format. ``is_async`` answers at once, and the log has the outcome;
    ``keep_pause`` leaves generation paused (in_place) until ``/continue_generation``.
    """
    if body.load_format is not None and body.load_format not in LOAD_FORMATS:
        raise InvalidRequest(f"load_format must be one of {', '.join(LOAD_FORMATS.names)}.", param="load_format")
    if not body.is_async:
        return await _update(server, body)
    task = asyncio.create_task(_update(server, body), name="update-weights")
    _updates.add(task)
    task.add_done_callback(_report)
    return f"Loading {body.model_path} has begun."


_updates: set[asyncio.Task[str]] = set()


def _report(task: asyncio.Task[str]) -> None:
    _updates.discard(task)
    if not task.cancelled():
        error = task.exception()
        log.log(logging.ERROR if error else logging.INFO, "update of the weights: %s", error or task.result())


async def _update(server: Server, body: UpdateWeightsRequest) -> str:
    context = server.context
    if body.abort_all_requests:
        context.client.abort("")
    async with context.status.weights_lock, weights_changing(server):
        deadline = asyncio.get_running_loop().time() + (_ABORT_GRACE_SECONDS if body.abort_all_requests else 0.0)
        command = UpdateWeights(body.model_path, body.revision, body.load_format or "auto")
        while True:
            try:
                done = await server.execute(command)
                await refresh_identity(server)
                break
            except Conflict:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
                await asyncio.sleep(0.05)
        if body.keep_pause and not context.client.generation_paused:
            with context.client.hold_requests():
                await server.execute(PauseGeneration("in_place"))
        step = None if body.token_step is None else str(body.token_step)
        context.model.weights_path = body.model_path
        context.model.weight_version = body.weight_version or step or context.model.weight_version
    return done


async def update_weights(server: Server, body: UpdateWeightsRequest) -> str:
    """``/update_weights_from_disk`` by its old name."""
    return await update_weights_from_disk(server, body)


COMMANDS.register("update_weights_from_disk")(Command(UpdateWeights, run, (
    Endpoint("/update_weights_from_disk", update_weights_from_disk, UpdateWeightsRequest,
             broadcast=Broadcast(slow=True, renames=True)),
    Endpoint("/update_weights", update_weights, UpdateWeightsRequest, broadcast=Broadcast(slow=True, renames=True)),
), while_paused=True, synchronizes=True, timeout=LOAD_SECONDS))
