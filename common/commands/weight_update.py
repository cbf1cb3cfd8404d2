"""Applies weights that a trainer has sent: each request's at once, or those of several requests together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from ..api.errors import Conflict, InvalidRequest, ServingError
from .base import LOAD_SECONDS, Broadcast, Command, Endpoint, Rank, Server
from .memory import resume
from .registry import COMMANDS

_POLL_SECONDS = 0.01
_ABORT_GRACE_SECONDS = 10.0  # aborted requests free their pages once their peers have answered


class BeginWeights(msgspec.Struct, frozen=True):
    """Begin a weight update of several requests: what is staged from now on is applied together."""


class DiscardWeights(msgspec.Struct, frozen=True):
    """Drop the staged weights, and end the update."""


class ApplyWeights(msgspec.Struct, frozen=True):
    """Apply the staged weights between two steps, and end the update. Refused while requests run that are not paused,
    or are transferred."""

    flush_cache: bool = True


class UpdateOptions(msgspec.Struct, kw_only=True):
    """The fields of a request with weights that say how they are applied."""

    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None


class EndRequest(UpdateOptions, kw_only=True):
    discard: bool | None = None


def run_begin(rank: Rank, command: BeginWeights) -> str:
    rank.weights.begin()
    return "Weights that are sent from now on are staged."


def run_discard(rank: Rank, command: DiscardWeights) -> str:
    return f"{rank.weights.discard()} staged tensors are dropped."


def run_apply(rank: Rank, command: ApplyWeights) -> str:
    if "weights" in rank.released:
        resume(rank, ("weights",))
    if not rank.weights.would_change():
        rank.weights.discard()
        if command.flush_cache:
            rank.batcher.cache.drop_unread()
        return "The weights are those already: nothing is changed."
    # Sessions end before the first weight is changed and begin again after the last: no KV cache that was computed with
    # the previous weights, or that a peer has computed with others, is ever mistaken for one of the new ones.
    rank.peers.leave()
    applied = rank.weights.apply()
    rank.forget_pages()
    rank.tp.barrier()
    rank.peers.join(rank.runner.model, rank.runner.draft_identity)
    rank.tp.barrier()  # a command after the reply finds all ranks updated
    return str(applied)


async def begin_weight_update(server: Server, body: None) -> str:
    """Begins an update of several requests: weights that are sent from now on are received and staged beside the steps,
    and ``/end_weight_update`` applies all of them at once."""
    status = server.context.status
    async with status.weights_lock:
        done = await server.execute(BeginWeights())
        status.staging_weights = True
    return done


async def end_weight_update(server: Server, body: EndRequest) -> str:
    """Applies what was sent since ``/begin_weight_update``, or drops it (``discard``).

    It is applied between two steps where generation is paused, else once the running requests have ended, or are
    aborted (``abort_all_requests``); new ones wait meanwhile. ``weight_version`` names the new weights. Pages of the
    prefix cache that were computed with other weights are never used again; with ``flush_cache`` (the default) it is
    also emptied where the weights are the same.
    """
    status = server.context.status
    async with status.weights_lock:
        if not status.staging_weights:
            raise InvalidRequest("No weight update has begun: send /begin_weight_update first.")
        done = await (server.execute(DiscardWeights()) if body.discard else _apply(server, body))
        status.staging_weights = False
    return done


async def send_weights(server: Server, stage: msgspec.Struct, options: UpdateOptions) -> str:
    """Stages weights by the command ``stage``, and applies them unless an update of several requests has begun. Raises
    ServingError, with the weights as before."""
    status = server.context.status
    async with status.weights_lock:
        if status.staging_weights:
            return await server.execute(stage)
        try:
            await server.execute(stage)
            return await _apply(server, options)
        except ServingError:
            with contextlib.suppress(ServingError):
                await server.execute(DiscardWeights())
            raise


async def _apply(server: Server, options: UpdateOptions) -> str:
    context, loop = server.context, asyncio.get_running_loop()
    if options.abort_all_requests:
        context.client.abort("")
    async with weights_changing(server), _without_requests(server):
        waits = bool(options.abort_all_requests) or not context.client.generation_paused
        deadline = loop.time() + (_ABORT_GRACE_SECONDS if waits else 0.0)
        while True:
            try:
                done = await server.execute(ApplyWeights(options.flush_cache is not False))
                break
            except Conflict:
                if loop.time() >= deadline:
                    raise
                await asyncio.sleep(_POLL_SECONDS)
        await refresh_identity(server)
        context.model.weight_version = options.weight_version or context.model.weight_version
    return done


@contextlib.asynccontextmanager
async def _without_requests(server: Server) -> AsyncIterator[None]:
    """Waits until the engine has no requests, or generation is paused; new ones wait for the block's end."""
    client = server.context.client
    with client.hold_requests("weights"):
        try:
            while client.num_open > client.num_held and not client.generation_paused:
                await asyncio.sleep(_POLL_SECONDS)
            yield
        finally:
            client.send_held("weights")


@contextlib.asynccontextmanager
async def weights_changing(server: Server) -> AsyncIterator[None]:
    """Lets a server of a pair refuse requests meanwhile, which other servers may take."""
    status = server.context.status
    status.weights_changing = True
    try:
        yield
    finally:
        status.weights_changing = False


async def refresh_identity(server: Server) -> None:
    """Reads which weights the engine has now."""
    status = server.context.status
    state = await server.context.client.state()
    assert status.ready is not None
    status.ready = msgspec.structs.replace(status.ready, model=state.model, pair_key=state.pair_key)


COMMANDS.register("begin_weight_update")(Command(BeginWeights, run_begin, (
    Endpoint("/begin_weight_update", begin_weight_update, broadcast=Broadcast(slow=True)),), while_busy=True))
COMMANDS.register("discard_weight_update")(Command(DiscardWeights, run_discard, (), while_busy=True))
COMMANDS.register("apply_weight_update")(Command(ApplyWeights, run_apply, (
    Endpoint("/end_weight_update", end_weight_update, EndRequest, broadcast=Broadcast(slow=True)),),
    while_paused=True, synchronizes=True, timeout=LOAD_SECONDS))
